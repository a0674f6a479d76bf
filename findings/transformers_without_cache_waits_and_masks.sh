#!/usr/bin/env bash
# transformers 5.24.0: use_cache=False, which every trainer passes, makes the host wait for the device once a forward,
# and compiled or graph-captured attention computes with a mask that eager attention does without.
#
# Without a cache and a mask, create_causal_mask asks whether the positions are of several packed sequences, by the truth
# of a tensor: on a GPU the host stops there in each forward until all before it has run. With the cache, the default, it
# does not ask. Where it cannot ask (torch.compile, a CUDA graph's capture) it takes the positions for packed, and gives
# scaled_dot_product_attention a mask in the place of is_causal, which flash kernels do not take.
#
# Expected: no difference, or the cache to cost more. Seen: 0 reads and no mask with it, 1 read or a mask without.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy

cat >"$folder/reads.py" <<'PYTHON'
import torch
import torch.nn.functional as F
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM


class Reads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=64)
model = LlamaForCausalLM(LlamaConfig(**sizes)).train()
ids = torch.randint(64, (2, 16))
reads, masks = {}, {}
for cache in (True, False):
    with Reads() as found:
        model(input_ids=ids, use_cache=cache)
    reads[cache] = found.count

    def look(graph, inputs):
        for node in graph.graph.nodes:
            if node.target is F.scaled_dot_product_attention:
                masks[cache] = node.kwargs.get("attn_mask") is not None
        return graph

    torch._dynamo.reset()
    torch.compile(model, backend=look)(input_ids=ids, use_cache=cache)
print(f"torch {torch.__version__}, transformers {transformers.__version__}, Llama in training, no padding, sdpa")
print(f"values that the host reads in a forward: with the cache {reads[True]}, with use_cache=False {reads[False]}")
print(f"attention has a mask when the model is compiled: with the cache {masks[True]}, with use_cache=False {masks[False]}")
raise SystemExit((reads, masks) != ({True: 0, False: 1}, {True: False, False: True}))
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/reads.py"
