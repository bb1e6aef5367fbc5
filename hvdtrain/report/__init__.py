"""`hvdtrain report`: an HTML page about runs, from their folders; `hvdtrain timeline`: Horovod's timeline."""
