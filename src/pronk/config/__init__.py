"""What a model is: ModelConfig, and the frequencies and stretching of its rotary positions."""

from pronk.config.model_config import ModelConfig
from pronk.config.rope_scaling import RopeScaling

__all__ = ["ModelConfig", "RopeScaling"]
