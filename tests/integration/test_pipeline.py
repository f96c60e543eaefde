"""Does a batch pass validate, plan, drain, write back and assemble, with every line once?"""

from service.batch import BatchStatus, LineState
from tests.pipeline import Pipeline, embedding_line


def test_every_line_is_answered_once_and_in_input_order(pipeline: Pipeline) -> None:
    lines = [embedding_line(f"id-{n}", "word " * (1 + n * 7 % 40)) for n in range(200)]
    batch_id = pipeline.submit(lines)
    pipeline.run()
    batch = pipeline.batch(batch_id)
    assert batch.status is BatchStatus.COMPLETED
    assert (batch.total, batch.completed, batch.failed) == (200, 200, 0)
    assert [line["custom_id"] for line in pipeline.output(batch_id)] == [
        f"id-{n}" for n in range(200)
    ]
    assert batch.error_file_id is None
    assert {row.state for row in pipeline.line_rows(batch_id)} == {LineState.SUCCEEDED}
