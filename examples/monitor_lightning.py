"""Lightning with a look inside: hidden states, attention, weights, and warnings; trainer and module are unchanged.

    python examples/monitor_lightning.py
    gnomon compare runs/monitor-lightning/gnomon --out runs/monitor.html

One line is gnomon's: the callback. The second command draws what it recorded; give it several folders and they stand side by side.
Needs `pip install lightning`.
"""

from __future__ import annotations

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import gnomon
from gnomon.models import Transformer, tiny


class LanguageModel(lightning.LightningModule):
    """Any model would do."""

    def __init__(self, lr: float, **settings):
        super().__init__()
        self.save_hyperparameters()
        self.model = Transformer(tiny(**dict(layers=3, width=32, context=64) | settings))

    def training_step(self, batch, _index):
        return self.model.loss(*batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.hparams.lr)


def main(steps: int = 60, lr: float = 3e-3, out: str = "runs/monitor-lightning", **arguments) -> lightning.Trainer:
    """Train on the text that gnomon ships, and return the trainer."""
    lightning.seed_everything(0)
    ids = torch.from_numpy(gnomon.data.tokenizer("byte").encode(gnomon.data.jargon()).astype("int64"))
    windows = ids[: len(ids) // 65 * 65].view(-1, 65)
    trainer = lightning.Trainer(**dict(
        max_steps=steps, default_root_dir=out, logger=False, enable_checkpointing=False, gradient_clip_val=1.0,
        callbacks=[gnomon.integrations.LightningMonitor(every=10)],
    ) | arguments)  # fmt: skip
    trainer.fit(LanguageModel(lr), DataLoader(TensorDataset(windows[:, :-1], windows[:, 1:]), batch_size=8))
    return trainer


if __name__ == "__main__":
    main()
