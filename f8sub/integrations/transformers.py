"""Float8 for transformers.

Float8Callback converts the model of a Trainer and computes scales after each step. Float8TrainingConfig has
``from_pretrained`` return a converted model. attend_causally spares a decoder the mask, and a wait for the GPU.
"""

import base64
import copy
import json
import warnings
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel, TrainerCallback
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.trainer_callback import ExportableState
from transformers.utils.quantization_config import QuantizationConfigMixin

import f8sub
from f8sub.convert.attention import WITHOUT_MASK, by_state, histories_of
from f8sub.errors import Float8ConfigError, shown
from f8sub.integrations.one_line import HIGH_PRECISION, attend_once, convert_once, refuse_unknown_attention

__all__ = ["Float8Callback", "Float8TrainingConfig", "attend_causally"]


def attend_causally(model: PreTrainedModel) -> None:
    """Have a decoder of transformers attend causally without a mask.

    For training on whole sequences, without padding and without several sequences in one. A call with ``cu_seq_lens_q``
    is an error, and the first one with ``position_ids`` that begin again. The result is that of
    ``attn_implementation="sdpa"``, bitwise. Without a cache transformers looks at the positions in each forward,
    whether they are of one sequence, and the host waits for the GPU there (5.24). In a CUDA graph it cannot look, and
    gives attention a mask, with which it is slower and rounds otherwise. So ``graph_step`` asks for this.

    Args:
        model: of transformers, whose layers attend to all tokens before a token.

    Raises:
        Float8ConfigError: no model of transformers, or one whose layers attend to a window or in chunks, and need
            a mask. Later, in a forward: several sequences in one.
    """
    if not isinstance(model, PreTrainedModel):
        raise Float8ConfigError(f"attend_causally takes a model of transformers, got {shown(model)}")
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds or window is not None:
        found = ", ".join(sorted(kinds)) or f"a window of {window} tokens"
        raise Float8ConfigError(
            f"attend_causally: {type(model).__name__} has layers with {found}, which need a mask; leave it as it is, "
            "and capture no CUDA graph of it"
        )
    AttentionInterface.register(WITHOUT_MASK, by_state(sdpa_attention_forward))
    model.set_attn_implementation(WITHOUT_MASK)
    hooks: Any = model._forward_pre_hooks.values()
    if not any(isinstance(hook, _RefusePacked) for hook in hooks):
        model.register_forward_pre_hook(_RefusePacked(), with_kwargs=True)


class _RefusePacked:
    """Raises in a forward pre-hook where tokens of several sequences would attend to each other."""

    def __init__(self) -> None:
        self._looked = False

    def __call__(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        packed = kwargs.get("cu_seq_lens_q") is not None
        positions = kwargs.get("position_ids")
        if isinstance(positions, torch.Tensor) and not self._looked:
            # Once: the host waits for the GPU here, and a run packs in all steps or in none.
            self._looked = True
            packed = packed or _begin_again(positions)
        if packed:
            raise Float8ConfigError(
                f"attend_causally: the batch of {type(model).__name__} has several sequences in one, which would "
                "attend to each other without a mask; train on whole sequences, or leave attn_implementation='sdpa'"
            )


def _begin_again(positions: torch.Tensor) -> bool:
    # ``graph_step`` has torch tell what waits in a launched step, and captures none of which the next one would wait.
    mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0
    if mode:
        torch.cuda.set_sync_debug_mode(0)
    try:
        return bool((positions.diff(dim=-1) < 0).any())
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode(mode)


class Float8Callback(TrainerCallback, ExportableState):
    """Converts the model of a Trainer, reports it, and computes scales after each optimizer step.

        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Float8Callback("tensorwise")])

    The model is converted when the Trainer is constructed, before it is sharded, and the main process prints the
    summary of ``conversion_report``. A model that was converted before stays as it is. The first scales are computed
    when training begins, from weights that are sharded and loaded by then. A training that fails or is repeated leaves
    one hook.

    What attention in float8 and delayed scaling remember of earlier steps is in the Trainer's own state,
    ``trainer_state.json`` of its checkpoints, from which ``resume_from_checkpoint`` gives it back.
    ``model.safetensors`` beside it has weights alone.

    Args:
        recipe: as ``convert_to_float8`` takes it; None for its default.
        attention: "float8" runs ``scaled_dot_product_attention`` over 8192 tokens and more by cuDNN's float8 kernels,
            which changes numbers; "float8_forward" with its backward in bf16; see ``f8sub.attend_in_float8``. With
            ``backend="reference"`` sequences of any length, by the reference. A model that attends in float8 already
            stays as it is.
        options: other keywords of ``convert_to_float8``.

    Raises:
        Float8ConfigError: what ``convert_to_float8`` and ``attend_in_float8`` raise; in ``train()``, a model that was
            not converted, because the callback was added after the Trainer was constructed, or because ``model_init``
            constructs another model: convert it there.
    """

    def __init__(self, recipe: Any = None, *, attention: str = HIGH_PRECISION, **options: Any) -> None:
        self._recipe, self._attention, self._options = recipe, attention, options
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._model: torch.nn.Module | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Convert the model, which the Trainer shards later, and print what is in float8."""
        report = convert_once(given["model"], self._recipe, self._options, self._attention)
        if state.is_world_process_zero:
            print(report)  # noqa: T201  (as the callbacks of transformers print)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Compute the scales, and register the hook on this training's optimizer."""
        # A training that failed did not come to its end.
        self.on_train_end(args, state, control)
        self._model = given["model"]
        # Of the checkpoint that is resumed, and without one what ``state`` returned. The Trainer writes to this entry
        # when it saves, and the checkpoint of a training without this callback has none.
        known = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        remembered = (known[0] if isinstance(known, list) else known)["attributes"].get(_HISTORIES, {})
        for name, history in _histories(self._model).items():
            # Those of another recipe may have other sizes.
            if name in remembered and (values := _read(remembered[name])).numel() == history.numel():
                history.copy_(values.view_as(history))
        f8sub.precompute_scales(given["model"])
        self._hook = f8sub.register_precompute_hook(given["optimizer"], given["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Remove the hook."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def state(self) -> dict[str, Any]:
        """Return what ``trainer_state.json`` has of attention in float8 and delayed scaling; read from the device."""
        histories = {} if self._model is None else _histories(self._model)
        return {
            "args": {},
            "attributes": {_HISTORIES: {name: _written(each) for name, each in histories.items()}},
        }


_HISTORIES = "histories"


def _histories(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what training keeps besides weights, float32, by the names that a plain model's state dict would have."""
    return {name.replace("_orig_mod.", ""): history for name, history in histories_of(model).items()}


def _written(history: torch.Tensor) -> str:
    # As base64: the Trainer gives each number a line, and a layer with delayed scaling has 3,000.
    return base64.b64encode(history.cpu().numpy().tobytes()).decode()


def _read(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32)


_METHOD = "f8sub"
"""The ``quant_method`` under which transformers finds config and quantizer."""


class Float8TrainingConfig(QuantizationConfigMixin):
    """A ``quantization_config`` with which ``from_pretrained`` returns a model that trains in float8.

        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=Float8TrainingConfig("tensorwise"))

    The checkpoint is loaded as it is without, and the model is then converted: its weights are master weights in high
    precision. All the rest is as with a model that ``convert_to_float8`` returned: the Trainer trains it without
    adapters, and ``save_pretrained`` writes plain weights and no ``quantization_config``, which loads without f8sub.
    ``Float8Callback()`` computes its scales in a Trainer. A checkpoint that is quantized already is an error of
    transformers; ``f8sub.load_float8`` reads those in float8.

    Args:
        recipe: as ``convert_to_float8`` takes it; None for its default.
        attention: as ``Float8Callback`` takes it.
        options: other keywords of ``convert_to_float8``.

    Raises:
        Float8ConfigError: no such ``attention``; in ``from_pretrained``, before weights are read, what
            ``convert_to_float8`` and ``attend_in_float8`` raise.
    """

    def __init__(self, recipe: Any = None, *, attention: str = HIGH_PRECISION, **options: Any) -> None:
        refuse_unknown_attention(attention)
        self.quant_method = _METHOD  # type: ignore[assignment]  # registered, not in the enum
        self.recipe, self.attention = recipe, attention
        self.options = options

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Return the config of a dict as YAML files of trainers hold it: ``quant_method``, recipe and options."""
        given = {name: value for name, value in config_dict.items() if name != "quant_method"}
        return super().from_dict(given, return_unused_kwargs, **kwargs)  # type: ignore[no-untyped-call]

    def to_dict(self) -> dict[str, Any]:
        """Return what ``from_dict`` takes; what JSON cannot hold, such as a filter function, as text."""
        asked = {} if self.attention == HIGH_PRECISION else {"attention": self.attention}
        plain = {"quant_method": _METHOD, "recipe": self.recipe, **asked, **self.options}
        return dict(json.loads(json.dumps(plain, default=str)))


class Float8TrainingQuantizer(HfQuantizer):
    """Converts what ``from_pretrained`` loads; transformers finds it by ``Float8TrainingConfig.quant_method``."""

    quantization_config: Float8TrainingConfig
    is_trainable = True
    is_qat_trainable = True
    is_compileable = True

    def is_serializable(self) -> bool:
        """Return True: a converted model has plain weights."""
        return True

    def preprocess_model(self, model: Any, dtype: torch.dtype | None = None, **given: Any) -> None:
        """Convert a copy of the model on meta: what is wrong with the options is raised before weights are read."""
        with warnings.catch_warnings(action="ignore"):
            self._convert(copy.deepcopy(model))

    def postprocess_model(self, model: Any, **given: Any) -> Any:
        """Convert the loaded model, and leave nothing on it by which it would count as quantized."""
        del model.hf_quantizer, model.config.quantization_config
        self._convert(model)
        return model

    def _convert(self, model: torch.nn.Module) -> None:
        config = self.quantization_config
        f8sub.convert_to_float8(model, config.recipe, **config.options)
        attend_once(model, config.attention, emulated=config.options.get("backend") == "reference")


register_quantization_config(_METHOD)(Float8TrainingConfig)
register_quantizer(_METHOD)(Float8TrainingQuantizer)
