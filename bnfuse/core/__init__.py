"""What everything rests on: errors, text, numbers from outside, windows, processes. Nothing here knows a graph."""
