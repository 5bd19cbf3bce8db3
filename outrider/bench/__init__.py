"""Measuring: prompts, a runner that always has plain decoding beside every configuration, and reports."""
