from hvdtrain.worker.run_script import main

main()
