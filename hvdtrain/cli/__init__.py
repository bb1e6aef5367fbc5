"""The command line: a table of commands (`command_table`), and each of them in a file of its own."""


def main() -> None:
    """What `hvdtrain` runs. Ctrl-C ends it without a word from here on: also while Click is imported."""
    from hvdtrain.signals import quit_on_ctrl_c

    quit_on_ctrl_c()
    from hvdtrain.cli.command_table import main as table

    table(prog_name="hvdtrain")
