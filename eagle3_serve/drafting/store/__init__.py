"""`eagle3-serve store`: what is in a store of hidden states, whether it is right, and stores that others wrote."""
