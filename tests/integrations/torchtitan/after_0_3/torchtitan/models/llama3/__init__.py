from torchtitan.models.llama3.flavors import build_model_config
from torchtitan.models.llama3.model import Llama3Model

__all__ = ["Llama3Model", "build_model_config"]
