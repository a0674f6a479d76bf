#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0: after a process's first from_pretrained() torch.linspace ignores torch.device contexts.
#
# from_pretrained() creates a model under torch.device("meta"), and while it does so torch.linspace is a function of
# transformers, which makes tensors on the CPU. torch collects the functions that a device context concerns when it first
# meets such a context, and keeps them as a set. Where from_pretrained() is the first to enter one, the set has the
# function of transformers in place of torch.linspace, which is put back afterwards and is in no set. From then on
# torch.linspace is on the CPU under every torch.device context and with torch.set_default_device, for the whole process.
#
# Expected: as torch.empty, before and after a model was loaded. Seen: meta before, the CPU after; and meta after it, too,
# where anything was created under a device context before the model was loaded. That is the way out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy

cat >"$folder/load.py" <<'PYTHON'
import json
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def devices() -> list[str]:
    with torch.device("meta"):
        made = [torch.linspace(0, 1, 3), torch.empty(3)]
    torch.set_default_device("meta")
    made += [torch.linspace(0, 1, 3), torch.empty(3)]
    torch.set_default_device(None)
    return [each.device.type for each in made]


if __name__ == "__main__":
    folder, when = sys.argv[1:]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    if when == "save":
        LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=1, **sizes)).save_pretrained(folder)
        raise SystemExit
    found = {"before": devices()} if when == "warm" else {}
    LlamaForCausalLM.from_pretrained(folder)
    print(json.dumps(found | {"after": devices()}))
PYTHON

load() { OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/load.py" "$folder/model" "$1" 2>"$folder/log" || { cat "$folder/log"; exit 1; }; }
load save
cold=$(load cold | tail -n 1) warm=$(load warm | tail -n 1)
echo "devices of linspace and empty in a context, and of both with a default device"
echo "the model is loaded first:  $cold"
echo "a context was there before: $warm"
"$folder/venv/bin/python" - "$cold" "$warm" <<'PYTHON'
import json
import sys

cold, warm = map(json.loads, sys.argv[1:])
as_seen = cold == {"after": ["cpu", "meta", "cpu", "meta"]} and warm == {"before": ["meta"] * 4, "after": ["meta"] * 4}
raise SystemExit(not as_seen)
PYTHON
