# %% [markdown]
# # Tutorial: from pretraining to serving
#
# One small model through every stage: convert, train, watch the numerics, save, resume, export for an inference
# engine, and fine-tune on the served weights. It takes 20 seconds on a CPU. On GPUs the same code uses float8
# hardware.
#
# Install `pip install -e '.[train,trainers]'`. Run `python docs/tutorial.py` or the [notebook](tutorial.ipynb), or
# paste the blocks in order.

# %% [markdown]
# ## 1. A model and some text
#
# A byte-level Llama of 2 blocks. In your run, `from_config` or `from_pretrained` takes its place.

# %%
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import f8sub

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
folder = Path(tempfile.mkdtemp())
config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    tie_word_embeddings=False,
)
text = torch.frombuffer(bytearray(Path(f8sub.__file__).read_bytes()), dtype=torch.uint8).long()
text = text.repeat(8192 // len(text) + 1)


def batch_of(size=8, length=64):
    starts = torch.randint(len(text) - length, (size,))
    return torch.stack([text[start : start + length] for start in starts]).to(device)


# %% [markdown]
# ## 2. What would float8 gain?
#
# The report shows which layers are converted and what share of the FLOPs they have. A tiny model gains nothing;
# ask about a real one with `f8sub.estimate("llama3-8b")` or `python -m f8sub inspect`. Start your own runs with
# the default recipe, `tensorwise`. This tutorial uses `blockwise`, because published float8 models and engines
# have its scales.

# %%
model = f8sub.convert_to_float8(LlamaForCausalLM(config).to(device), recipe="blockwise")
print(f8sub.conversion_report(model).summary)

# %% [markdown]
# ## 3. Pretrain
#
# Two calls: `precompute_scales` once before the first step and after every step. The guard skips steps whose
# gradients are not finite, and the monitor measures x, w and dy of each layer in one step of ten. Under FSDP2,
# call `fully_shard` before the optimizer is created: [the guide](guide.md#the-whole-script).

# %%
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
guard = f8sub.skip_step_if_nonfinite(optimizer)
monitor = f8sub.Monitor(model, every=10, to=str(folder / "numerics.jsonl"))


def train(model, optimizer, steps, monitor=None):
    losses = []
    for _ in range(steps):
        batch = batch_of()
        if monitor is None:
            loss = model(batch, labels=batch).loss
            loss.backward()
        else:
            with monitor:
                loss = model(batch, labels=batch).loss
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)
        losses.append(loss.item())
    return losses


f8sub.precompute_scales(model)
losses = train(model, optimizer, 40, monitor)
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, skipped steps: {int(guard.skipped)}")
assert losses[-1] < losses[0]

# %% [markdown]
# ## 4. Look at the numerics
#
# The operands with the lowest median-row SQNR. A gaussian has 31 dB in e4m3 (x and w) and 25 dB in e5m2 (dy).
# Below 15 dB, skip the layer or use `rowwise` for it.

# %%
print(monitor.worst(3))

# %% [markdown]
# ## 5. Save and resume
#
# A state dict holds plain tensors: a bf16 script loads it, and so does a float8 run. The resumed run is bitwise
# the uninterrupted one.

# %%
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "checkpoint.pt")
random = torch.get_rng_state()
uninterrupted = train(model, optimizer, 5)

resumed = f8sub.convert_to_float8(LlamaForCausalLM(config).to(device), recipe="blockwise")
optimizer = torch.optim.AdamW(resumed.parameters(), lr=3e-3)
state = torch.load(folder / "checkpoint.pt", weights_only=True)
resumed.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
f8sub.precompute_scales(resumed)
torch.set_rng_state(random)
assert train(resumed, optimizer, 5) == uninterrupted
print("the resumed run has the losses of the uninterrupted one")

# %% [markdown]
# ## 6. Serve
#
# `save_float8` writes exactly the float8 data that the training multiplied, in a layout that transformers, vLLM
# and SGLang read. transformers loads it here and decodes.

# %%
f8sub.save_float8(resumed, str(folder / "served"), dtype=torch.float32)
print(sorted(path.name for path in (folder / "served").iterdir()))
served = AutoModelForCausalLM.from_pretrained(folder / "served", dtype=torch.float32)
prompt = batch_of(size=1, length=16).cpu()
written = served.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
print(bytes(written[0].tolist()))

# %% [markdown]
# ## 7. Fine-tune on the served weights
#
# A frozen base stores float8 data alone, 1 byte per parameter, taken from the file. Only the output head learns
# here; with PEFT, adapters do: [LoRA](lora.md).

# %%
tuned = f8sub.convert_to_float8(LlamaForCausalLM(config), recipe="blockwise", primary_weights=True)
tuned.requires_grad_(False)
f8sub.load_float8(tuned, str(folder / "served"))
tuned.lm_head.weight.requires_grad_(True)
tuned.to(device)
optimizer = torch.optim.AdamW([tuned.lm_head.weight], lr=1e-3)
losses = train(tuned, optimizer, 10)
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")

# %% [markdown]
# Next: [shard it](guide.md), [choose a recipe](recipes.md), [measure the
# speed](performance.md#measure-on-your-own-machine).
