"""The calibrator: how far to speculate, decided online from what rounds cost and what is accepted. docs/calibration.md explains it."""

from .calibrator import Calibrator

__all__ = ["Calibrator"]
