"""What passes recognise: operators of source graphs, ours, and chains of them."""
