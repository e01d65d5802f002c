"""The one description of a run: a form in the UI, a YAML file on disk, `section.key=value` on the command line.

Field titles and descriptions are user text. Impossible combinations are refused here, before anything starts. Imports no torch.
"""

from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gyre_lib.config.errors import InputError

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


class SchedulingConfig(Section):
    """What runs when: dispatch depth, burst length, and when cells may join training."""

    model_config = ConfigDict(title="Scheduling")

    policy: Literal["elastic", "async", "colocate"] = Field(
        "elastic",
        title="Scheduling policy",
        description="elastic: cells move one by one; async: fixed pools; colocate: the whole pool switches.",
    )
    dispatch: Literal["boundary", "continuous"] = Field(
        "boundary",
        title="Dispatch",
        description="boundary: refill after each publication; continuous (async only): refill when a group is ready.",
    )
    bursts: Count = Field(4, title="Bursts", description="How many bursts the run has.")
    groups_per_batch: Count = Field(4, title="Groups per batch (B)", description="Distinct rollout groups consumed by one training step.")
    executions_per_group: Count = Field(8, title="Executions per group (N)", description="Independent executions of one query.")
    steps_per_burst: Count = Field(2, title="Steps per burst (mu)", description="Training steps between two weight publications.")
    extra_dispatch: float = Field(
        0.5, ge=0, title="Extra dispatch (phi)", description="Groups dispatched ahead, in units of B; phi times B must be an integer."
    )
    supply_fraction: float = Field(
        0.25, gt=0, le=1, title="Supply fraction (rho_min)", description="Share of a batch that must be ready before a cell joins training."
    )
    supply_hold_s: float = Field(
        60.0, ge=0, title="Supply hold (tau), s", description="How long that supply must have held without a break, in seconds."
    )
    join_headroom: float = Field(
        1.0, ge=1, title="Join headroom", description="A cell joins only if the rest has room for this many times what is outstanding."
    )
    spread_reroutes: bool = Field(
        False, title="Spread rerouted executions", description="To the least loaded engines, instead of filling the longest-lived first."
    )
    streaming: bool = Field(
        True, title="Streaming", description="Start a step on the first ready group instead of waiting for the whole batch."
    )
    oversampling: int = Field(
        0, ge=0, title="Oversampling", description="Executions launched per group beyond N; the first N valid ones are kept."
    )
    lost_groups: Literal["placeholder", "requeue"] = Field(
        "placeholder",
        title="Lost groups",
        description="A group without a valid reward: count it as an empty group, or run its query again.",
    )

    @property
    def phi(self) -> Fraction:
        """Extra dispatch as the exact fraction the user wrote (0.1 is 1/10)."""
        return Fraction(str(self.extra_dispatch))

    @model_validator(mode="after")
    def _possible(self) -> "SchedulingConfig":
        if (self.phi * self.groups_per_batch).denominator != 1:
            raise ValueError(
                f"extra_dispatch: phi*B must be an integer, got {self.extra_dispatch} * {self.groups_per_batch}"
                f" = {float(self.phi * self.groups_per_batch):g}"
            )
        if self.dispatch == "continuous" and self.policy != "async":
            raise ValueError(f"dispatch: continuous dispatch exists for policy async only, not {self.policy}")
        return self


class CellsConfig(Section):
    """The machines: cells, what one cell holds, and its training layout."""

    model_config = ConfigDict(title="Cells")

    count: Count = Field(3, title="Cells (K)", description="Elastic cells; cell 0 is the core.")
    capacity: Count = Field(16, title="Capacity per cell (C_e)", description="Concurrent executions of one cell in rollout.")
    standalone_engines: int = Field(0, ge=0, title="Standalone engines", description="Engines that are always in rollout.")
    standalone_capacity: int = Field(
        0, ge=0, title="Standalone capacity (C_s)", description="Concurrent executions of the standalone pool."
    )
    training_cells: int = Field(1, ge=1, title="Training cells (async)", description="Cells that always train, under policy async.")
    tensor_parallel: Count = Field(1, title="Tensor parallel", description="Ranks that share each layer inside a cell.")
    pipeline_parallel: Count = Field(1, title="Pipeline parallel", description="Pipeline stages inside a cell.")
    data_parallel: Count = Field(1, title="Data parallel", description="Copies inside a cell; a micro-step has one microbatch for each.")
    context_parallel: Count = Field(
        1, title="Context parallel", description="Ranks that share a row's tokens (GPU with Transformer Engine only)."
    )
    expert_parallel: Count = Field(1, title="Expert parallel", description="Ranks that share the experts of a layer.")
    device: Literal["cpu", "cuda"] = Field(
        "cpu", title="Device", description="cpu: gloo and torch kernels; cuda: NCCL and Transformer Engine."
    )
    weight_transport: Literal["mooncake", "socket"] = Field(
        "mooncake",
        title="Weight transport",
        description="How satellites read the core's weights; socket where Mooncake cannot be installed.",
    )
    threads_per_process: Count = Field(
        1, title="Threads per process", description="CPU threads of each engine and rank; 1 on small machines."
    )

    @property
    def ranks_per_cell(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel * self.context_parallel

    @model_validator(mode="after")
    def _possible(self) -> "CellsConfig":
        if (self.standalone_engines == 0) != (self.standalone_capacity == 0):
            raise ValueError("standalone_capacity: standalone_engines and standalone_capacity must both be zero or both be positive")
        if self.device == "cpu" and self.context_parallel > 1:
            raise ValueError("context_parallel: needs Transformer Engine (device cuda); on cpu it must be 1")
        if self.expert_parallel not in (1, self.tensor_parallel):
            raise ValueError(
                f"expert_parallel: must be 1 or equal tensor_parallel ({self.tensor_parallel}), whose ranks share out the experts; got {self.expert_parallel}"
            )
        return self


class RolloutConfig(Section):
    """How executions run: tasks, harness, sandbox, time budgets, sampling."""

    model_config = ConfigDict(title="Rollout")

    tasks: str = Field("data/tasks/train", title="Training tasks", description="Folder of task folders (Harbor layout).")
    heldout_tasks: str = Field("data/tasks/heldout", title="Held-out tasks", description="Folder of task folders for evaluate-policy.")
    task_format: Literal["harbor", "nl2repo", "deepswe"] = Field("harbor", title="Task format", description="Layout of the task folders.")
    harness: Literal["builtin", "claude-code", "mini-swe-agent"] = Field("builtin", title="Harness", description="The agent program.")
    sandbox: Literal["bubblewrap", "docker", "kubernetes"] = Field(
        "bubblewrap", title="Sandbox", description="Where executions and evaluations run."
    )
    harness_budget_s: Seconds = Field(
        120.0, title="Harness budget, s", description="Wall-clock limit of the harness; work left behind is still scored."
    )
    overall_budget_s: Seconds = Field(300.0, title="Overall budget, s", description="Wall-clock limit of an execution with its evaluation.")
    worker_slots: Count = Field(8, title="Worker slots", description="Executions that one worker process runs at once.")
    max_turns: Count = Field(8, title="Model calls per execution", description="A harness is stopped after this many model calls.")
    max_context_tokens: Count = Field(2048, title="Context window, tokens", description="Prompt and output together, of one model call.")
    max_output_tokens: Count = Field(256, title="Output limit, tokens", description="Most tokens that one model call generates.")
    temperature: float = Field(1.0, gt=0, title="Temperature", description="Sampling temperature; the trainer divides logits by it.")
    request_retry_budget_s: Seconds = Field(
        60.0, title="Request retry budget, s", description="How long a stalled request is retried before the harness sees it."
    )

    @model_validator(mode="after")
    def _possible(self) -> "RolloutConfig":
        if self.harness_budget_s >= self.overall_budget_s:
            raise ValueError(
                f"harness_budget_s: must be below overall_budget_s, got {self.harness_budget_s:g} >= {self.overall_budget_s:g}"
            )
        if self.max_output_tokens >= self.max_context_tokens:
            raise ValueError("max_output_tokens: must be below max_context_tokens")
        return self


class EvaluationConfig(Section):
    """How preserved work is scored."""

    model_config = ConfigDict(title="Evaluation")

    retries: int = Field(2, ge=0, title="Evaluation retries", description="Further tries of a failed evaluation on the same artifact.")
    timeout_s: Seconds = Field(60.0, title="Evaluation timeout, s", description="Wall-clock limit of one evaluation.")
    heldout_samples: Count = Field(4, title="Held-out samples", description="Executions per held-out task in evaluate-policy.")


class TrainingConfig(Section):
    """The objective and the optimizer step."""

    model_config = ConfigDict(title="Training")

    learning_rate: float = Field(1e-6, gt=0, title="Learning rate", description="Adam, constant.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, title="Adam beta 1", description="First-moment decay.")
    adam_beta2: float = Field(0.95, ge=0, lt=1, title="Adam beta 2", description="Second-moment decay.")
    adam_eps: float = Field(1e-8, gt=0, title="Adam epsilon", description="Denominator floor.")
    weight_decay: float = Field(0.0, ge=0, title="Weight decay", description="Decoupled decay per step.")
    clip_grad_norm: float = Field(1.0, gt=0, title="Gradient clip", description="Global norm above which gradients are scaled down.")
    ratio_low: float = Field(0.995, gt=0, le=1, title="Execution ratio, low", description="Gate for negative advantages.")
    ratio_high: float = Field(1.005, ge=1, title="Execution ratio, high", description="Gate for positive advantages.")
    token_weight_cap: float = Field(5.0, gt=0, title="Token weight cap", description="Largest importance weight of one token.")
    advantage_std: bool = Field(
        True, title="Divide by standard deviation", description="Divide a group's advantages by its rewards' standard deviation."
    )
    max_trajectories: Count | None = Field(
        5, title="Trajectories per execution (J_max)", description="Most admitted trajectories; empty for no limit."
    )
    row_tokens: Count = Field(4096, title="Token budget of a row", description="Most tokens of one packed row (one microbatch).")
    lookahead: Count = Field(
        16,
        title="Packing lookahead, micro-steps",
        description="Rows kept buffered before another ready group is taken; fewer leave more groups ready, which is what lets satellites join.",
    )
    lease_s: Seconds = Field(
        120.0,
        title="Micro-step lease, s",
        description="A cell that holds work and is silent this long leaves the batch; more than one micro-step takes.",
    )
    stall_limit_s: Seconds = Field(
        600.0, title="Stage stall limit, s", description="A pipeline stage that waits longer for its neighbour fails."
    )
    seed: int = Field(0, title="Seed", description="Seed of admission draws and of task order.")


class ModelConfig(Section):
    """The policy."""

    model_config = ConfigDict(title="Model")

    path: str = Field(
        "data/models/tiny-qwen3", title="Model folder", description="Hugging Face format: config.json, safetensors, tokenizer."
    )
    renderer: Literal["auto", "qwen3", "qwen35", "qwen36", "qwen38"] = Field(
        "auto", title="Renderer", description="Chat template as a token renderer."
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", title="Data type", description="Weights of trainer and engines.")


class StorageConfig(Section):
    """Where a run's data goes."""

    model_config = ConfigDict(title="Storage")

    url: str = Field("", title="Segment store", description="fsspec URL for sealed segments (s3://…); empty: the run's folder.")
    segment_mib: Count = Field(64, title="Segment size, MiB", description="An open segment is sealed at this size.")


class RunConfig(Section):
    """A training run."""

    model_config = ConfigDict(title="Run")

    name: str = Field(
        "run",
        pattern=r"^[a-z0-9][a-z0-9-]{0,62}$",
        title="Run name",
        description="Lower case, digits, dashes. The same name resumes the run.",
    )
    scheduling: SchedulingConfig = SchedulingConfig()
    cells: CellsConfig = CellsConfig()
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    training: TrainingConfig = TrainingConfig()
    model: ModelConfig = ModelConfig()
    storage: StorageConfig = StorageConfig()

    @model_validator(mode="after")
    def _possible(self) -> "RunConfig":
        s, c = self.scheduling, self.cells
        if s.policy == "async" and c.training_cells >= c.count and c.standalone_capacity == 0:
            raise ValueError("cells.training_cells: policy async needs at least one cell or standalone engine in rollout")
        return self


def load_config(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file and apply `section.key=value` overrides (values are YAML).

    Raises InputError naming the file or the field.
    """
    try:
        data = yaml.safe_load(path.read_text()) or {}
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such configuration file") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: a configuration is a mapping of sections")
    for override in overrides or []:
        _apply(data, override)
    return parse_config(data, str(path))


def parse_config(data: dict[str, Any], source: str) -> RunConfig:
    """Validate; raises InputError with one line that names the field."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        separator = "." if first["type"] == "value_error" and field else ": "
        raise InputError(f"{source}: {field}{separator if field else ''}{message}{more}") from error


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals:
        raise InputError(f"{override}: an override is written section.key=value")
    *sections, last = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise InputError(f"{key}: {section} is not a section")
    data[last] = yaml.safe_load(value)
