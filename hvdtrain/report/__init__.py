"""`hvdtrain report`: an HTML page about one run or several, drawn from the files in their folders."""
