from hvdtrain.cli import main

main(prog_name="hvdtrain")
