"""Architectures with masks, caches of positions and buffers of all kinds train for a while, and none of it is an alarm."""

import contextlib

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from kit.thorough import THOROUGH
from safe_ckpt import CheckpointConfig, Checkpointer, Retention, events

STEPS, EVERY = (200, 20) if THOROUGH else (6, 3)
CONFIG = CheckpointConfig(retention=Retention(keep_last=2))
pytestmark = [pytest.mark.timeout(580), pytest.mark.filterwarnings("ignore")]

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "d_model": 32, "n_embd": 32, "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2,
    "num_attention_heads": 2, "num_heads": 2, "n_head": 2, "num_key_value_heads": 2, "intermediate_size": 64, "d_ff": 64,
    "ffn_dim": 64, "max_position_embeddings": 64, "n_positions": 64, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "n_inner": 64,
    "embedding_size": 32, "num_hidden_groups": 1, "head_dim": 16, "rotary_dim": 8, "d_kv": 16, "max_window_layers": 1,
    "num_experts": 2, "num_local_experts": 2, "word_embed_proj_dim": 32, "state_size": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
CAUSAL = ("llama", "gpt2", "mistral", "opt", "gpt_neox", "bloom", "falcon", "phi", "qwen2", "gemma", "mixtral", "gptj",
          "codegen", "gpt_neo", "gpt_bigcode", "stablelm", "starcoder2", "mamba", "olmo", "cohere")  # fmt: skip
MASKED = ("bert", "roberta", "electra", "albert", "deberta-v2", "distilbert")
SEQ2SEQ = ("t5", "bart", "marian", "pegasus")


def model_of(kind):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind)
    for name, value in SMALL.items():
        if hasattr(config, name):
            with contextlib.suppress(AttributeError):  # one that follows from others
                setattr(config, name, value)
    if kind in SEQ2SEQ:
        config.decoder_start_token_id, config.decoder_vocab_size = 1, config.vocab_size
    if kind == "gpt_neo":
        config.attention_types, config.attention_layers = [[["global", "local"], 1]], ["global", "local"]
    make = AutoModelForCausalLM if kind in CAUSAL else AutoModelForMaskedLM if kind in MASKED else AutoModelForSeq2SeqLM
    return make.from_config(config)


@pytest.mark.parametrize("kind", (*CAUSAL, *MASKED, *SEQ2SEQ) if THOROUGH else ("bloom", "t5"))
def test_a_transformer_raises_no_alarm(tmp_path, kind):
    """A family of Hugging Face's, tiny and made from its configuration alone."""
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    told = []
    with Checkpointer(tmp_path, CONFIG, hooks=[told.append]) as ckpt:
        for step in range(1, STEPS + 1):
            tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(step))
            model(input_ids=tokens, labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % EVERY == 0:
                assert not ckpt.save(step, {"model": model, "optimizer": optimizer}).result().marked, told
    assert [event for event in told if isinstance(event, events.Unhealthy)] == []


class Odd(torch.nn.Module):
    """Infinite masks, a table of distances, a running minimum, quantised weights and their scales, an uninitialised cache."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.full((16, 16), -torch.inf).triu(1))
        self.register_buffer("bias", torch.tensor([[0.0, torch.inf], [-torch.inf, 0.0]]))
        self.register_buffer("scales", torch.rand(8).to(torch.float16))
        self.register_buffer("packed", torch.randint(-128, 127, (8, 8), dtype=torch.int8))
        self.register_buffer("eighth", torch.rand(8).to(torch.float8_e4m3fn))
        self.register_buffer("rotary", torch.outer(torch.arange(16.0), 1.0 / 10000 ** (torch.arange(4.0) / 4)))

    def forward(self, x):
        return self.norm(self.layer(x))


def test_masks_and_quantised_buffers_raise_no_alarm(tmp_path):
    """Two networks against each other, two optimizers, a loss scaler whose scale is infinite at times, averages of weights."""
    torch.manual_seed(0)
    first, second = Odd(), Odd()
    averaged = torch.optim.swa_utils.AveragedModel(first)
    one = torch.optim.Adam(first.parameters(), amsgrad=True)
    other = torch.optim.RMSprop(second.parameters(), momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=1)
    state = {"first": first, "second": second, "averaged": averaged, "one": one, "other": other, "scaler": scaler}
    with Checkpointer(tmp_path, CONFIG) as ckpt:
        for step in range(1, STEPS + 1):
            for network, optimizer in ((first, one), (second, other)):
                x = torch.randn(4, 8) * (1e4 if step % 7 == 0 else 1)
                scaler.scale(network(x).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            averaged.update_parameters(first)
            if step % EVERY == 0:
                assert not ckpt.save(step, state).result().marked
        assert ckpt.resume(state).step == STEPS // EVERY * EVERY
