"""Tables of answers: reference -> (answers that are right, answers that are wrong)."""


def cases(*tables: dict[str, tuple[list[str], list[str]]]) -> list[tuple[str, str, float]]:
    """(answer, reference, score) for every answer."""
    return [
        (answer, gold, score)
        for table in tables
        for gold, (right, wrong) in table.items()
        for score, answers in ((1.0, right), (0.0, wrong))
        for answer in answers
    ]
