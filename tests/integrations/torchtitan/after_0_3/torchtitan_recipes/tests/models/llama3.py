from torchtitan.trainer import Trainer

from torchtitan_recipes.models.llama3 import recipe


def llama3_debugmodel(seq_len: int | None = 2048) -> Trainer.Config:
    return recipe("debugmodel", 8e-4, seq_len)
