"""The words after ``phalanx run``: those of other launchers and of a file put into ours, and the groups of --help."""

from __future__ import annotations

import click

from phalanx.launch.job.spellings import translate

__all__ = ["RunCommand"]

# The options in the order of --help; those that no group names come first.
_GROUPS = {
    "What each rank gets": (
        "device",
        "bind",
        "memory",
        "variables",
        "replace",
        "interface",
        "no_preload",
        "pass_local_rank",
    ),
    "The terminal, and files": (
        "reader",
        "debugged",
        "quiet",
        "no_prefix",
        "only",
        "log_dir",
        "tee",
        "grace",
        "restarts",
        "config",
        "save_config",
        "svg",
    ),
    "When ranks hang": ("warn_after", "report_dir", "report_after"),
    "Other hosts": ("hosts", "hostfile", "ppn", "starter", "mpi", "address"),
    "Without running it": ("rehearse", "placement", "dry_run", "as_json"),
}


class RunCommand(click.Command):
    """Accepts the options of other launchers too, and shows its own in groups."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {
            name: not option.is_flag
            for option in self.get_params(ctx)
            if isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts)
        }
        ours, ctx.meta["notes"] = translate(args, own)
        typed, _, _ = self.make_parser(ctx).parse_args(list(ours))
        if typed.get("config"):
            # Not imported at the top, because most calls need no reader of TOML.
            from phalanx.launch.job.config_file import read_config, words_of_config

            parameters = self.get_params(ctx)
            # click has marked what was not typed in several ways over the years, but never by one of these.
            names = {name for name, value in typed.items() if isinstance(value, (str, bool, list, tuple)) and value}
            before, after = words_of_config(read_config(typed["config"], parameters), parameters, names)
            ours = [*before, *ours, *after]
        return super().parse_args(ctx, ours)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        named = {name for names in _GROUPS.values() for name in names}
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        first = {"Options": [option.name for option in options if option.name not in named]}
        for title, names in {**first, **_GROUPS}.items():
            records = [option.get_help_record(ctx) for option in options if option.name in names]
            with formatter.section(title):
                formatter.write_dl([record for record in records if record is not None])
