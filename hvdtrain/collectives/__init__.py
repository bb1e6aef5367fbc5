"""The one room that talks to Horovod: what travels between ranks, under which name, and how it is combined."""
