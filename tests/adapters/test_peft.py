"""Low-rank adapters as people train them: exact resumption, the base written once, the adapter exported by itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning_runs import PACKAGES, package
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers import Trainer as StockTrainer

from accelerate_runs import CONFIG, fresh, make
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, Retention
from safe_ckpt.accelerate import register
from safe_ckpt.errors import RestoreError, StateError
from safe_ckpt.peft import base_hash, load_adapter
from safe_ckpt.transformers import SafeCheckpointMixin
from support import program_path

pytestmark = [pytest.mark.timeout(200), pytest.mark.filterwarnings("ignore")]
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 500,
}
WIDE = {"head_dim": 256}
FROZEN = "model-00002-of-00002.safetensors"


def base(seed=0, **sizes):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **sizes))


def tuned(seed=0):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], lora_dropout=0.1)
    return get_peft_model(base(seed), lora)


def rows(count=16):
    return torch.randint(0, 500, (count, 12), generator=torch.Generator().manual_seed(3))


def bits(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Plain:
    def __init__(self, seed=0):
        self.model = tuned(seed)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train(self, begin, end):
        for step in range(begin, end):
            torch.manual_seed(step)
            batch = rows()[2 * step : 2 * step + 2]
            self.model(input_ids=batch, labels=batch).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.mark.quick
def test_a_plain_loop_with_an_adapter_writes_its_base_once_and_goes_on(tmp_path):
    """The base is on the disk once. A resumed run ends with the weights of an uninterrupted one, from whatever base."""
    whole = Plain()
    whole.train(0, 6)
    run = Plain()
    with Checkpointer(tmp_path, CheckpointConfig(retention=Retention(keep_last=3))) as ckpt:
        for step in range(1, 4):
            run.train(step - 1, step)
            ckpt.save(step, run.state).result()
    again = Plain(seed=9)
    with Checkpointer(tmp_path, CheckpointConfig()) as ckpt:
        begin = ckpt.resume(again.state).step
        again.train(begin, 6)
        ckpt.save(6, again.state).result()
    assert same(bits(again.model), bits(whole.model))
    assert len({path.stat().st_ino for path in tmp_path.glob(f"*/{FROZEN}")}) == 1
    own = sum(p.stat().st_size for p in (tmp_path / "step-00000006").iterdir() if p.name != FROZEN)
    trained = sum(p.numel() * 4 for p in again.model.parameters() if p.requires_grad)
    assert own < 1.02 * 3 * trained + (1 << 20)


@pytest.mark.quick
def test_an_exported_adapter_is_loaded_by_peft_and_knows_its_base(tmp_path):
    """In PEFT's own layout, so PEFT loads it; with the hash of its base, so it is put on no other one."""
    run = Plain()
    run.train(0, 2)
    with Checkpointer(tmp_path / "run", CheckpointConfig()) as ckpt:
        ckpt.export(run.model, tmp_path / "adapter", adapters_only=True).result()
        with pytest.raises(StateError, match="PeftModel"):
            ckpt.export(base(), tmp_path / "other", adapters_only=True)
    assert {"adapter_model.safetensors", "adapter_config.json", "base.json"} <= set(os.listdir(tmp_path / "adapter"))
    assert (
        json.loads((tmp_path / "adapter/base.json").read_text())["xxh3_128"]
        == base_hash(base())
        == base_hash(run.model)
    )
    size = sum(path.stat().st_size for path in (tmp_path / "adapter").iterdir())
    assert size < 4 * sum(p.numel() for p in run.model.parameters() if p.requires_grad) + (1 << 16)
    batch = rows(2)
    run.model.eval()
    expected = run.model(input_ids=batch).logits
    for loaded in (PeftModel.from_pretrained(base(), tmp_path / "adapter"), load_adapter(base(), tmp_path / "adapter")):
        assert torch.equal(loaded.eval()(input_ids=batch).logits, expected)
    with pytest.raises(RestoreError, match="trained on a base with the hash"):
        load_adapter(base(seed=1), tmp_path / "adapter")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("default", "all biases"),
        ("model", "plain"),
        ("0", "tied"),
        ("q_proj", "compiled"),
        ("default", "plain"),
        ("default", "recomputed"),
        ("default", "parallel"),
    ],
)
def test_the_base_is_the_same_however_it_is_wrapped(tmp_path, name, how):
    """Whatever the adapter's name, whether biases are trained, tensors are tied, or layers compiled: it is its own base."""
    more = {"bias": "all"} if how == "all biases" else {}
    plain, wrapped = base(), base()
    expected = base_hash(plain)
    if how == "compiled":
        wrapped.model.layers[0] = torch.compile(wrapped.model.layers[0])
        assert base_hash(wrapped) == expected
    model = get_peft_model(wrapped, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **more), adapter_name=name)
    assert base_hash(model) == expected
    layers = model.base_model.model.model.layers
    if how in ("recomputed", "parallel"):
        layers[0] = (checkpoint_wrapper if how == "recomputed" else torch.nn.DataParallel)(layers[0])
        assert base_hash(model) == expected
    if how == "tied":
        layers[1].self_attn.q_proj.lora_A[name].weight = layers[0].self_attn.q_proj.lora_A[name].weight
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01)
    with Checkpointer(tmp_path / "run", CheckpointConfig()) as ckpt:
        ckpt.export(model, tmp_path / "adapter", adapters_only=True).result()
    loaded = load_adapter(base(), tmp_path / "adapter").eval()
    batch = rows(2)
    if how != "compiled":
        assert torch.equal(loaded(input_ids=batch).logits, model.eval()(input_ids=batch).logits)
    other = base()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(RestoreError):
        load_adapter(other, tmp_path / "adapter")
    model.merge_adapter()
    with pytest.raises(StateError, match="merged"):
        base_hash(model)


KINDS = {
    "prompt tuning": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix tuning": lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "IA3": lambda: IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "DoRA": lambda: LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
    "token indices": lambda: LoraConfig(
        r=4, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1, 7]}
    ),
    "embedding": lambda: LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
    "parameters": lambda: LoraConfig(r=4, target_modules=[], target_parameters=["q_proj.weight"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_adapters_know_their_base_too(tmp_path, kind):
    """Exported, loaded by PEFT and by us with equal outputs, refused on another base; the base is hashed as it is alone."""
    model = get_peft_model(base(), KINDS[kind]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01)
    assert base_hash(model) == base_hash(base())
    with Checkpointer(tmp_path / "run", CheckpointConfig()) as ckpt:
        ckpt.export(model, tmp_path / "adapter", adapters_only=True).result()
    batch = rows(2)
    expected = model.eval()(input_ids=batch).logits
    for loaded in (PeftModel.from_pretrained(base(), tmp_path / "adapter"), load_adapter(base(), tmp_path / "adapter")):
        assert torch.equal(loaded.eval()(input_ids=batch).logits, expected)
    with pytest.raises(RestoreError, match="trained on a base with the hash"):
        load_adapter(base(seed=1), tmp_path / "adapter")


@pytest.mark.quick
def test_a_base_that_peft_changes_is_not_recorded(tmp_path, caplog):
    """PiSSA takes a part of the base away: the hash of the rest would refuse the base itself."""
    model = get_peft_model(base(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa"))
    with Checkpointer(tmp_path / "run", CheckpointConfig()) as ckpt:
        ckpt.export(model, tmp_path / "adapter", adapters_only=True).result()
    assert "is not recorded" in caplog.text
    assert not (tmp_path / "adapter/base.json").exists()
    loaded = load_adapter(base(), tmp_path / "adapter").eval()
    batch = rows(2)
    assert torch.allclose(loaded(input_ids=batch).logits, model.eval()(input_ids=batch).logits, atol=1e-4)


def _saves_sharded(rank, folder):
    model = base(**WIDE)
    for layer in model.model.layers:
        layer.requires_grad_(requires_grad=False)
    model.load_state_dict(torch.load(folder / "expected.pt", weights_only=True))
    fully_shard(model)
    with Checkpointer(folder / "sharded") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"model": model}).result()


def test_stock_loaders_need_nothing_of_ours(tmp_path):
    """safetensors, torch, Accelerate, Transformers and DCP read checkpoints that share, in a process without this package."""
    model = base(**WIDE)
    for layer in model.model.layers:
        layer.requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with Checkpointer(tmp_path / "run") as ckpt:
        for step in (1, 2, 3):
            model(input_ids=rows(2), labels=rows(2)).loss.backward()
            optimizer.step()
            ckpt.save(step, {"model": model, "optimizer": optimizer}).result()
    assert (tmp_path / "run/step-00000003" / FROZEN).stat().st_nlink == 3
    torch.save(model.state_dict(), tmp_path / "expected.pt")
    values(spawn_ranks(_saves_sharded, 2, tmp_path, timeout_s=90))
    assert all(path.stat().st_nlink > 1 for path in tmp_path.glob("sharded/step-00000003/model/__*_1.distcp"))
    program = program_path("reads_with_stock_loaders")
    command = [sys.executable, str(program), str(tmp_path), json.dumps({**SIZES, **WIDE})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def _accelerated(folder, begin, end, load):
    with fresh():
        accelerator = make(folder, limit=3)
        with register(accelerator, CONFIG):
            run = Plain(seed=9 if load else 0)
            run.model, run.optimizer = accelerator.prepare(run.model, run.optimizer)
            if load:
                accelerator.load_state()
            for step in range(begin, end):
                run.train(step, step + 1)
                accelerator.save_state()
        return bits(accelerator.unwrap_model(run.model))


@pytest.mark.quick
def test_accelerate_saves_base_and_adapter_in_one_file_and_goes_on(tmp_path):
    """``save_state`` has base and adapter in one file, as Accelerate's layout wants it; a resumed run is exact."""
    whole = _accelerated(tmp_path / "whole", 0, 5, load=False)
    _accelerated(tmp_path / "run", 0, 3, load=False)
    assert same(_accelerated(tmp_path / "run", 3, 5, load=True), whole)


class SafeTrainer(SafeCheckpointMixin, StockTrainer):
    checkpoint_config = CONFIG


def _trained(folder, steps, *, resume):
    data = [{"input_ids": row, "labels": row} for row in rows()]
    how = {"save_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 100}
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, lr_scheduler_type="constant", **how
    )
    made = SafeTrainer(model=tuned(), args=arguments, train_dataset=data)
    made.train(resume_from_checkpoint=resume)
    return bits(made.model)


@pytest.mark.quick
def test_a_trainer_saves_the_adapter_alone_and_goes_on(tmp_path):
    """The Trainer saves the adapter alone, and a resumed run is exact on the same base."""
    whole = _trained(tmp_path / "whole", 4, resume=False)
    _trained(tmp_path / "run", 2, resume=False)
    assert (tmp_path / "run/checkpoint-2/adapter_model.safetensors").exists()
    assert same(_trained(tmp_path / "run", 4, resume=True), whole)


def _lit(folder, steps, resume):
    from safe_ckpt.lightning import SafeCheckpointCallback, resumable

    pl = package(PACKAGES[0])

    class Tuned(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = tuned(9 if resume and steps > 2 else 0)

        def training_step(self, batch, batch_idx):
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

        def train_dataloader(self):
            return resumable(torch.utils.data.DataLoader(rows(), batch_size=2))

    pl.seed_everything(1, verbose=False)
    callback = SafeCheckpointCallback(dirpath=folder, every_n_train_steps=1, resume="auto" if resume else None)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    module = Tuned()
    pl.Trainer(callbacks=[callback], max_steps=steps, default_root_dir=folder, **quiet).fit(module)
    return bits(module)


@pytest.mark.quick
def test_lightning_saves_base_and_adapter_in_one_file_and_goes_on(tmp_path):
    """One ``.ckpt`` has base and adapter; a resumed run is exact, whatever base it began with."""
    whole = _lit(tmp_path / "whole", 4, resume=False)
    _lit(tmp_path / "run", 2, resume=True)
    assert same(_lit(tmp_path / "run", 4, resume=True), whole)
    assert Path(tmp_path / "run").exists()
