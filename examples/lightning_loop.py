"""Lightning: module and trainer are its own, unchanged, the weights on manifolds.

    python examples/lightning_loop.py

Only `configure_optimizers` speaks of gnomon. Needs `pip install lightning`.
"""

from __future__ import annotations

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import gnomon
from gnomon.models import Transformer, tiny


class LanguageModel(lightning.LightningModule):
    """Any model would do; this one is gnomon's transformer, whose stream stays on a sphere."""

    def __init__(self, lr: float = 0.02, **settings):
        super().__init__()
        self.save_hyperparameters()
        self.model = Transformer(tiny(residual="proj-spheret", **settings))

    def training_step(self, batch, _index):
        x_BT, y_BT = batch
        loss = self.model.loss(x_BT, y_BT)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        assignment = gnomon.assign(self.model, "hetero")  # Stiefel for attention, DGram for the MLP, AdamW for the rest
        optimizer = gnomon.ManifoldMuon(assignment, lr=self.hparams.lr, adamw_lr=4e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(steps: int = 60, out: str = "runs/lightning", resume: str | None = None, **settings) -> lightning.Trainer:
    """Train, keep a checkpoint in `out`, and return the trainer."""
    lightning.seed_everything(0)
    model = LanguageModel(**settings)
    context = model.model.config.context
    ids = torch.from_numpy(gnomon.data.tokenizer("byte").encode(gnomon.data.jargon()).astype("int64"))
    windows = ids[: len(ids) // (context + 1) * (context + 1)].view(-1, context + 1)
    batches = DataLoader(TensorDataset(windows[:, :-1], windows[:, 1:]), batch_size=16)
    trainer = lightning.Trainer(
        max_steps=steps, default_root_dir=out, logger=False, enable_checkpointing=False, gradient_clip_val=1.0
    )
    trainer.fit(model, batches, ckpt_path=resume)
    trainer.save_checkpoint(f"{out}/last.ckpt")
    print(f"loss {trainer.callback_metrics['loss']:.3f} after {trainer.global_step} steps")
    return trainer


if __name__ == "__main__":
    main()
