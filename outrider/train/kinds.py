"""The table of drafters that can be trained. The command line and the docs read it; adding one is a file and a line."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """place: ``module:Trainee`` among the drafters; beside the trainee stand its options and `layers_of`. options: their name."""

    place: str
    options: str
    summary: str

    def load(self) -> tuple[Any, Any, Any]:
        """The trainee's class, its options' class, and what says which states it reads."""
        name, trainee = self.place.split(":")
        module = importlib.import_module(f"..drafters.{name}", __package__)
        return getattr(module, trainee), getattr(module, self.options), module.layers_of


KINDS = {
    "eagle3": Kind("eagle_training:EagleTrainee", "EagleTraining", "a layer that goes on from the target's hidden states"),
    "medusa": Kind("medusa_training:MedusaTrainee", "HeadsTraining", "a head for each distance on the target's last state"),
    "hydra": Kind(
        "medusa_training:HydraTrainee", "HeadsTraining", "Medusa's heads, which see the tokens drafted before theirs"
    ),
    "mtp": Kind("mtp_training:MtpTrainee", "MtpTraining", "a layer of the target's family on its last state"),
    "draft-model": Kind("model_training:ModelTrainee", "ModelTraining", "some of the target's layers, as a model of its own"),
}
