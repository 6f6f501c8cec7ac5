"""A model of Hugging Face transformers on the ops: `attn_implementation="paged_ops"`.

A small Llama with random weights (no download), a padded batch, grouped KV heads; greedy tokens are those of
the model's eager attention. Run: python examples/transformers_generate.py
"""

import sys

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import paged_ops.integrations.transformers  # noqa: F401  # registers the name
except ImportError as error:
    sys.exit(f"transformers_generate: needs torch and transformers ({error})")

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
model = LlamaForCausalLM(config).eval()
for parameter in model.parameters():  # weights that make greedy choices neither ties nor loops
    if parameter.ndim == 2:
        torch.nn.init.normal_(parameter, 0, 0.15)

ids = torch.randint(3, 256, (3, 20))
mask = torch.ones_like(ids)
for row, padding in enumerate((0, 6, 13)):  # on the left, as generate wants it
    ids[row, :padding], mask[row, :padding] = 0, 0

tokens = {}
for name in ("eager", "paged_ops"):
    model.set_attn_implementation(name)
    tokens[name] = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=24, eos_token_id=None, pad_token_id=0
    )[:, ids.shape[1] :]

assert torch.equal(tokens["eager"], tokens["paged_ops"]) and tokens["eager"].unique().numel() > 5
print(f"generate on paged_ops gives the tokens of eager attention: {tokens['paged_ops'][0, :8].tolist()} ...")
