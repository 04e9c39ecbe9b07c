"""What a training graph is and does, node by node: origins, matches, work, traffic. Nothing here changes a graph."""
