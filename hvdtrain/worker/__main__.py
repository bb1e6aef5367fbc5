from hvdtrain.worker.program import main

main()
