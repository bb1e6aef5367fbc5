"""The command line: a table of commands (`command_table`), with one file per command."""


def main() -> None:
    """Entry point of `hvdtrain`. From here on, even while Click is imported, Ctrl-C exits without a traceback."""
    from hvdtrain.signals import quit_on_ctrl_c

    quit_on_ctrl_c()
    from hvdtrain.cli.command_table import main as table

    table(prog_name="hvdtrain")
