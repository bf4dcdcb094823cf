"""Messages about wrong options of a command."""

import click


def usage_message(error: click.ClickException) -> str:
    """Return the message of click, which then does not propose hidden options."""
    if isinstance(error, click.NoSuchOption) and error.possibilities and error.ctx:
        hidden = {
            name
            for param in error.ctx.command.params
            if getattr(param, "hidden", False)
            for name in (*param.opts, *param.secondary_opts)
        }
        error.possibilities[:] = [name for name in error.possibilities if name not in hidden]
    return error.format_message()
