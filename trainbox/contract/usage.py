"""What the commands of both programs share beside their options."""

import click

from trainbox.contract.errors import Failure, WrongUse

PAGE = {"help_option_names": ["--help", "-h"], "max_content_width": 110}
TEMPLATE = "template"  # the key of a script's arguments in the context


class Templated(click.Command):
    """A command that takes what follows `--` as the template of a script's arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[TEMPLATE] = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])


def failure_of(error: click.ClickException | Failure) -> Failure:
    """Return an error of click as a failure, whose message does not propose hidden options."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, click.NoSuchOption) and error.possibilities and error.ctx:
        hidden = {
            name
            for param in error.ctx.command.params
            if getattr(param, "hidden", False)
            for name in (*param.opts, *param.secondary_opts)
        }
        error.possibilities[:] = [name for name in error.possibilities if name not in hidden]
    return WrongUse(error.format_message())
