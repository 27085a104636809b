"""Check the gradient of a launch against its definition: recorded steps beside a computation row by row.

May know the trainer, the settings and the mathematics. Begin with `watched`, then `row_by_row`.
"""
