"""A run, as data: what is trained, on what, where and how.

`RunConfig` is everything `python -m train` reads; nothing is read from the environment. Each
field is a command-line option of the same dotted name. Presets (`train.presets`) are functions
that return one. Every class raises ValueError naming field, value and remedy.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from pallas_ops.routing.limits import why_no_kernel
from torch_gemma4.config import Gemma4Config
from train.data.config import DataConfig
from train.data.tokenizer import ByteTokenizer
from train.sharding import is_hidden_matrix
from train.validate import require as _require
from train.validate import require_at_least as _require_at_least


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices and the axes they form. Both axes split the batch; `fsdp` splits the weights too."""

    platform: Literal["cpu", "tpu"] = "cpu"
    """cpu makes data * fsdp virtual devices in this process; tpu uses the chips of the slice."""
    fsdp: int = 4
    """Devices over which every weight and its optimizer state are sharded."""
    data: int = 1
    """Replicas of that, for more than one slice."""

    def __post_init__(self) -> None:
        for name in ("fsdp", "data"):
            _require_at_least(1, f"mesh.{name}", getattr(self, name))
        _require(
            self.platform == "tpu" or self.num_devices < 128,
            "mesh.fsdp * mesh.data",
            self.num_devices,
            "a CPU process runs no backward pass with 128 virtual devices or more (the autograd "
            "engine counts them in 8 bits); give fewer, or --mesh.platform tpu",
        )

    @property
    def num_devices(self) -> int:
        """All devices of the mesh."""
        return self.data * self.fsdp

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """(name, size) of each axis, outermost first."""
        return (("data", self.data), ("fsdp", self.fsdp))


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Parameters and optimizer state are always float32."""

    compute: Literal["float32", "bfloat16"] = "bfloat16"
    """Activations, and the weights as they enter a matrix product."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Weight gradients while they are summed over the mesh (matrices other than experts: the wider
    of this and compute)."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW or Muon with linear warm-up; weight decay touches no 1-D parameter."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon moves hidden matrices along their momentum made orthogonal, and all else as adamw; the
    same learning rate and weight decay suit both (train/muon.py)."""
    learning_rate: float = 3e-3
    """At its peak, after warm-up."""
    warmup_steps: int = 20
    """Steps over which it rises from zero. A run that ends sooner never reaches the peak."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """From the end of warm-up to the last step. wsd stays at the peak, as constant does, and falls
    in a straight line at the end."""
    min_lr_ratio: float = 0.1
    """Where all but constant end, as a share of the peak."""
    decay_share: float = 0.2
    """Share of all steps over which wsd falls."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    momentum: float = 0.95
    """Of Muon's matrices."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled: the parameter shrinks by learning rate times this each step."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    skip_outliers: float = 0.0
    """An update is skipped if its gradient norm is so many standard deviations above the mean of
    the last ones (6 is common); 0: only if it is not finite."""
    outlier_window: int = 128
    """How many last ones."""
    abort_after: int = 20
    """Updates skipped in a row after which the run ends."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "clip_norm"):
            value = getattr(self, name)
            _require(value > 0, f"optim.{name}", value, "give a positive number")
        for name in ("warmup_steps", "weight_decay", "skip_outliers"):
            _require_at_least(0, f"optim.{name}", getattr(self, name))
        _require_at_least(2, "optim.outlier_window", self.outlier_window)
        _require_at_least(1, "optim.abort_after", self.abort_after)
        for name in ("min_lr_ratio", "decay_share"):
            share = getattr(self, name)
            _require(0 <= share <= 1, f"optim.{name}", share, "give a share between 0 and 1")
        _require(0 <= self.momentum < 1, "optim.momentum", self.momentum, "give a decay in [0, 1)")
        for beta in self.betas:
            _require(0 <= beta < 1, "optim.betas", self.betas, "give two decays in [0, 1)")

    def num_moments(self, parameter: str) -> int:
        """Tensors of state that the optimizer keeps for a parameter, by its name."""
        return 1 if self.name == "muon" and is_hidden_matrix(parameter) else 2


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved, and when. A run whose folder has a checkpoint goes on from it (`resume`)."""

    folder: str | None = None
    """A folder or an address (gs://bucket/runs) that every host sees; the run's checkpoints go into
    NAME/checkpoints in it. None: log.dir."""
    every_minutes: float = 10
    """Between two temporary checkpoints, of which the newest are kept; 0: none."""
    every_steps: int = 1000
    """Between two permanent checkpoints, which are never removed. The last step's is permanent too.
    0 and every_minutes 0: nothing is saved at all."""
    keep: int = 2
    """Newest checkpoints that stay, temporary or not: the second is there in case the first is
    damaged."""
    start_from: str | None = None
    """A checkpoint's folder (runs/NAME/checkpoints/step-00001000) to begin with, where the run has
    none of its own."""

    def __post_init__(self) -> None:
        for name in ("every_minutes", "every_steps"):
            _require_at_least(0, f"checkpoint.{name}", getattr(self, name))
        _require_at_least(1, "checkpoint.keep", self.keep)

    @property
    def is_on(self) -> bool:
        """Whether anything is saved."""
        return self.every_minutes > 0 or self.every_steps > 0


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Loss on held-out text, always on the same batches; also after the last step."""

    every: int = 100
    """Steps between two evaluations; 0: none at all."""
    batches: int = 4
    """Batches of the training shape (fewer where the held-out text has fewer)."""

    def __post_init__(self) -> None:
        _require_at_least(0, "eval.every", self.every)
        _require_at_least(1, "eval.batches", self.batches)


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Text written by the model when training ends, and before."""

    prompt: str = "def "
    """How it begins."""
    length: int = 120
    """Tokens to add; 0: no sample."""
    temperature: float = 0.7
    """Of the softmax tokens are drawn from; 0 takes the likeliest."""
    every: int = 0
    """Steps between two samples; 0: only when training ends."""

    def __post_init__(self) -> None:
        _require_at_least(0, "sample.length", self.length)
        _require_at_least(0, "sample.every", self.every)
        _require_at_least(0, "sample.temperature", self.temperature)
        _require(len(self.prompt) > 0, "sample.prompt", self.prompt, "give at least a character")
        try:
            ByteTokenizer().encode_all([self.prompt.encode()])
        except ValueError:
            remedy = "give text that UTF-8 can say, without byte 0"
            raise ValueError(f"sample.prompt = {self.prompt!r}: {remedy}") from None


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where metrics go. Only a run that goes on, or may (`resume`), writes into an existing folder;
    any other gets `-2` behind its name, and so on."""

    dir: str = "runs"
    """Folder that holds one folder a run."""
    every: int = 10
    """Steps between two printed lines where there is no terminal (metrics.jsonl has all)."""
    tensorboard: bool = True
    """Write TensorBoard scalars beside metrics.jsonl."""
    wandb: str = ""
    """Weights & Biases project to log to as well (pip install -e '.[wandb]'); '': none."""
    heat_map_every: int = 100
    """Steps between two pictures of the load of every expert in every layer, expert_load.png; one
    is drawn at the end, too. 0: none."""

    def __post_init__(self) -> None:
        _require_at_least(1, "log.every", self.every)
        _require_at_least(0, "log.heat_map_every", self.heat_map_every)


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """A trace of some steps, host and devices, in runs/NAME/profile."""

    first: int = 0
    """First step to trace, such as 10 (step 1 compiles); 0: no trace."""
    last: int = 0
    """Last step to trace; a few are enough, a file grows by megabytes a step."""

    def __post_init__(self) -> None:
        _require_at_least(0, "profile.first", self.first)
        if self.first or self.last:
            remedy = f"give a step from profile.first = {self.first} on, or neither of them"
            _require(1 <= self.first <= self.last, "profile.last", self.last, remedy)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run. Checks here what depends on more than one part."""

    name: str
    """Folder of the run under log.dir."""
    steps: int
    """Optimizer steps."""
    seed: int = 0
    """Initial parameters and the sample's draws."""
    layers: Literal["loop", "scan"] = "scan"
    """scan compiles one layer of a kind and runs it as a device loop; loop unrolls them all."""
    attention: Literal["kernel", "einsum"] = "kernel"
    """kernel holds a block of the scores at a time; einsum holds all of a layer's, S * S a head,
    and is quicker for short sequences on a CPU, where kernels are interpreted."""
    dispatch: Literal["auto", "kernel", "gather"] = "auto"
    """How tokens go to experts and come back: kernel moves blocks of bf16 rows whose width is a
    multiple of 128, gather any rows one by one; auto takes the kernels where they can, and the plan
    printed before the first step says which."""
    fence_expert_gathers: bool = False
    """Each layer's router waits until its expert weights are gathered, so that those gathers begin
    before it. No number changes."""
    resume: Literal["auto", "required", "never"] = "auto"
    """auto goes on from the newest whole checkpoint of this name, or begins where there is none;
    required refuses to begin; never begins a run of its own, in a folder NAME-2."""
    init_from: str | None = None
    """A local folder of Hugging Face safetensors with the run's first weights, whose config.json is
    this model's (--model_from FOLDER). A run that goes on from a checkpoint does not read it."""
    hang_minutes: float = 60
    """The run ends, and says where it waited, when no step has ended for so long (compiling the
    first one counts); 0: it waits for ever."""
    recompute: Literal["none", "full", "save_global_attention", "save_attention"] = "none"
    """What the backward pass runs again to save memory. none keeps all activations; full keeps the
    layers' inputs and runs every layer again; the others also keep attention's results, in global
    layers or in all, and do not run it again. (The loss makes its logits again in any case.)"""
    offload_activations: bool = False
    """What recomputed layers keep for the backward pass lies in the host's memory until then,
    outside HBM. Only on TPUs, with --layers scan: the copies run beside the layers."""
    accumulate: int = 1
    """Micro-batches of a step: its batch is run in so many parts, one after another, which takes
    the memory of one of them and gives the same gradients. data.batch_size is that of the step."""
    mesh: MeshConfig = MeshConfig()
    """Devices."""
    precision: PrecisionConfig = PrecisionConfig()
    """Dtypes."""
    data: DataConfig = DataConfig()
    """Documents."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is saved."""
    eval: EvalConfig = EvalConfig()
    """Held-out loss."""
    sample: SampleConfig = SampleConfig()
    """Generated text."""
    log: LogConfig = LogConfig()
    """Metrics."""
    profile: ProfileConfig = ProfileConfig()
    """Traces."""
    model: Gemma4Config
    """What is trained."""

    def __post_init__(self) -> None:
        _require_at_least(1, "steps", self.steps)
        _require_at_least(0, "hang_minutes", self.hang_minutes)
        _require(
            self.name not in ("", ".", "..") and "/" not in self.name,
            "name",
            self.name,
            "it names a folder under log.dir: give a plain name, and the place as --log.dir",
        )
        _require_at_least(1, "accumulate", self.accumulate)
        parts = self.mesh.num_devices * self.accumulate
        _require(
            self.data.batch_size % parts == 0,
            "data.batch_size",
            self.data.batch_size,
            f"give a multiple of mesh.data * mesh.fsdp * accumulate = {parts}: "
            "every device takes the same number of sequences in every micro-batch",
        )
        _require(
            self.data.sequence_length % self.model.num_loss_tiles == 0,
            "data.sequence_length",
            self.data.sequence_length,
            f"give a multiple of model.num_loss_tiles = {self.model.num_loss_tiles}",
        )
        by_bytes = self.data.source != "synthetic" and not self.data.tokenizer.path
        _require(
            self.model.vocab_size >= ByteTokenizer.vocab_size or not by_bytes,
            "model.vocab_size",
            self.model.vocab_size,
            f"the byte tokenizer has {ByteTokenizer.vocab_size} ids: give at least that",
        )
        _require(
            self.resume != "required" or self.checkpoint.is_on,
            "resume",
            self.resume,
            "nothing is saved with checkpoint.every_minutes = checkpoint.every_steps = 0: give one "
            "of them, or --resume auto",
        )
        _require(
            not (self.init_from and self.checkpoint.start_from),
            "init_from",
            self.init_from,
            f"a run begins with one set of weights, and checkpoint.start_from = "
            f"{self.checkpoint.start_from!r} has another: give one of the two",
        )
        self._check_held_out()
        _require(
            self.attention == "kernel" or not self.recompute.startswith("save_"),
            "recompute",
            self.recompute,
            "only the attention kernel has a result to keep: give --attention kernel, or "
            "--recompute full",
        )
        self._check_offload()
        _require(
            self.optim.name != "muon" or not self.model.split_expert_weights,
            "optim.name",
            self.optim.name,
            "it needs experts' matrices whole, and model.split_expert_weights stores halves of "
            "them: give --model.no_split_expert_weights, or adamw",
        )
        if self.dispatch == "kernel" and (reason := self._why_no_kernel()):
            raise ValueError(f"dispatch = 'kernel': {reason}, or give --dispatch auto")

    def _check_offload(self) -> None:
        met = {
            "all activations would go to the host: give --recompute full": self.recompute != "none",
            "only a device loop hides the copies: give --layers scan": self.layers == "scan",
            "a CPU has one memory: give --mesh.platform tpu": self.mesh.platform == "tpu",
        }
        for remedy, is_met in met.items() if self.offload_activations else ():
            _require(is_met, "offload_activations", True, remedy)

    def _check_held_out(self) -> None:
        if self.eval.every == 0:
            return
        if self.data.source == "files":
            fraction = self.data.eval_fraction
            remedy = "no text is held out to evaluate on: give a share, or --eval.every 0"
            _require(fraction > 0, "data.eval_fraction", fraction, remedy)
        elif self.data.source == "huggingface":
            name = self.data.huggingface.eval_split
            remedy = "nothing to evaluate on: name a split, or give --eval.every 0"
            _require(len(name) > 0, "data.huggingface.eval_split", name, remedy)

    def to_dict(self) -> dict[str, Any]:
        """Every field, as JSON can say it."""
        return json.loads(self.to_json())

    def _why_no_kernel(self) -> str | None:
        model = self.model
        if not model.enable_moe_block:
            return "the model has no experts; give one that has"
        dtype = getattr(torch, self.precision.compute)
        return why_no_kernel(model.hidden_size, dtype, model.top_k_experts, model.num_experts)

    @property
    def dispatch_in_force(self) -> tuple[Literal["kernel", "gather"], str | None]:
        """What `dispatch` comes to, and why auto did not take the kernels."""
        if self.dispatch != "auto":
            return self.dispatch, None
        reason = self._why_no_kernel()
        return ("kernel", None) if reason is None else ("gather", reason)

    def to_json(self) -> str:
        """Every field, indented; written as config.json into the run's folder."""
        return json.dumps(asdict(self), indent=2)
