"""Labels a large table over several machines with Ray Data; each worker loads the model once.

    pip install "ray[data]" "memfit[onnx]"
    python examples/ray_batch.py run reviews.csv labelled --backend onnx-int8 --workers 4

On a cluster the run's folder must lie at the same path on every machine, or be a hub id.
"""

from __future__ import annotations

import argparse
from typing import Any

import memfit


class Label:
    """A worker: it holds a classifier and adds two columns to every batch of rows."""

    def __init__(self, run: str, backend: str, column: str) -> None:
        self.classifier = memfit.load(run, backend=backend)
        self.column = column

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Answers a batch of rows; Ray hands over columns and takes columns back."""
        texts = [str(text) for text in batch[self.column]]
        answers = self.classifier.predict(texts, progress=False)
        return {
            **batch,
            "predicted": [one.label for one in answers],
            "score": [one.score for one in answers],
        }


def main() -> None:
    """Reads a CSV file, labels it, writes Parquet files."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="an output folder or a hub id")
    parser.add_argument("table", help="a CSV file, or a folder of them")
    parser.add_argument("output", help="a folder for the Parquet files")
    parser.add_argument("--column", default="review")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0.0, help="of each worker")
    options = parser.parse_args()
    ray.data.read_csv(options.table).map_batches(
        Label,
        fn_constructor_args=[options.run, options.backend, options.column],
        batch_size=1024,
        compute=ray.data.ActorPoolStrategy(size=options.workers),
        num_gpus=options.gpus,
    ).write_parquet(options.output)


if __name__ == "__main__":
    main()
