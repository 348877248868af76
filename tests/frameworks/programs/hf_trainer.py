"""Hugging Face Trainer on a BERT of a few thousand parameters, made from its configuration: nothing is downloaded.

Usage: hf_trainer.py FOLDER [NAME]; NAME is TrainingArguments' ddp_backend. Each rank leaves what it has trained there.
"""

import sys

import torch
from tests.frameworks.programs.leaving import leave
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random words; the label is whether the first is among the lower half of the vocabulary."""

    def __init__(self) -> None:
        self.words = torch.randint(0, 32, (64, 6), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": (words[0] < 16).long()}


def main() -> None:
    folder, *backend = sys.argv[1:]
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    arguments = TrainingArguments(
        output_dir=f"{folder}/output",
        per_device_train_batch_size=8,
        num_train_epochs=6,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_backend=backend[0] if backend else None,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(), eval_dataset=Sentences())
    trainer.train()
    evaluated = trainer.evaluate()
    leave(
        folder,
        arguments.process_index,
        arguments.world_size,
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        model.parameters(),
        evaluated=evaluated["eval_loss"],
    )


if __name__ == "__main__":
    main()
