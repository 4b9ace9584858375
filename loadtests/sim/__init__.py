"""The simulator: the gateway's routing code and the worker's scheduling code on a virtual clock."""
