"""Supervised fine-tuning with TRL, of a language model of a few thousand parameters: nothing is downloaded.

Usage: trl_sft.py FOLDER; each rank leaves what it has trained there.
"""

import sys

import torch
from datasets import Dataset
from tests.frameworks.programs.leaving import leave
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", *(f"word{number}" for number in range(30))]


def sentences() -> Dataset:
    """Each is three words over and over, so that a model can learn how it goes on."""
    picked = torch.randint(2, 32, (64, 3), generator=torch.Generator().manual_seed(1))
    return Dataset.from_dict({"text": [" ".join(WORDS[word] for word in words.tolist() * 4) for words in picked]})


def main() -> None:
    folder = sys.argv[1]
    torch.manual_seed(0)
    vocabulary = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    vocabulary.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=32,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    arguments = SFTConfig(
        output_dir=f"{folder}/output",
        per_device_train_batch_size=8,
        num_train_epochs=20,
        learning_rate=0.02,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=16,
    )
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=sentences(), processing_class=tokenizer)
    trainer.train()
    leave(
        folder,
        arguments.process_index,
        arguments.world_size,
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        model.parameters(),
    )


if __name__ == "__main__":
    main()
