from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module, ModuleDict, ModuleList

__all__ = ["BaseModel", "Module", "ModuleDict", "ModuleList"]
