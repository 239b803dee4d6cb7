"""What a run tells while it runs: metrics.jsonl, TensorBoard, W&B, and a person at a terminal.

    directory = create_run_directory(config)
    with MetricsWriter(directory, config.log, num_steps=config.steps) as metrics:
        metrics.log(step, loss=..., grad_norm=..., tokens_per_s=..., step_time_s=..., ...)
        metrics.expert_load(step, load)
        metrics.sample(step, text)

writer: the above; sinks: where it goes; experts: how busy each is; rates: what a time amounts to.
"""

from train.metrics.experts import expert_load_metrics
from train.metrics.rates import Rates, host_memory
from train.metrics.writer import MetricsWriter, create_run_directory

__all__ = ["MetricsWriter", "Rates", "create_run_directory", "expert_load_metrics", "host_memory"]
