from torchtitan.components.optim import AdamW, Optim, OptimizersContainer
from torchtitan.config import TrainingConfig
from torchtitan.models.llama3 import build_model_config
from torchtitan.trainer import Trainer


def llama3_8b(seq_len: int | None = None) -> Trainer.Config:
    return recipe("8B", 3e-4, seq_len)


def llama3_70b(seq_len: int | None = None) -> Trainer.Config:
    return recipe("70B", 1.5e-4, seq_len)


def recipe(flavor: str, lr: float, seq_len: int | None) -> Trainer.Config:
    model = build_model_config(flavor, seq_len=seq_len)
    return Trainer.Config(
        model=model,
        optim=Optim.Config(
            optimizer=OptimizersContainer.Config(optimizers=[AdamW.Config(pattern=r".*", lr=lr)])
        ),
        training=TrainingConfig(max_context_length=model.max_context_length, steps=1000),
    )
