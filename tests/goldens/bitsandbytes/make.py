"""Makes this folder with transformers and bitsandbytes, on a CPU: python tests/goldens/bitsandbytes/make.py

Written with bitsandbytes 0.50.2 and transformers 5.23.0: a tiny random model saved after load_in_8bit, and beside it
its weights as bitsandbytes dequantizes them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import bitsandbytes
import torch
from safetensors.torch import save_file
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
with tempfile.TemporaryDirectory() as plain:
    LlamaForCausalLM(config).save_pretrained(plain)
    in_8_bits = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=5.0)
    model = LlamaForCausalLM.from_pretrained(plain, quantization_config=in_8_bits, device_map="cpu")
model.save_pretrained(HERE)
(HERE / "generation_config.json").unlink()
linears = {n: m.weight for n, m in model.named_modules() if isinstance(m, bitsandbytes.nn.Linear8bitLt)}
weights = {f"{n}.weight": bitsandbytes.functional.int8_vectorwise_dequant(w.data, w.SCB) for n, w in linears.items()}
(HERE / "dequantized").mkdir(exist_ok=True)
save_file(weights, HERE / "dequantized" / "weights.safetensors")
