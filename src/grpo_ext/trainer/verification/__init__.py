"""Whether a launch trains by the gradient that the papers define: watched steps beside a computation row by row.

May know the trainer, the settings and the mathematics. Begin with `watched`, then `row_by_row`.
"""
