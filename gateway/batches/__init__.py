"""The Batch API: a file of requests becomes a file of answers, at the lowest priority.

A batch is a job of a gateway. Its state is one entry in Redis, which is replaced together with
each piece of the files of answers and of errors; so a line is answered once, whichever gateway
goes on. The id and the seed of a line's request follow from the batch and the line's number:
asking the engine again finds the same generation, or makes the same text.

    body, answer_schema     what clients send and get
    records, store          what Redis keeps
    line_reader             the lines of a file, from any place in it
    validation              the check of the whole file, before the first answer
    line_requests           what the engine is asked for a line
    line_call               the answer to one line
    batch_run               validates, answers, and ends a batch
    batch_jobs, service     batches as jobs
"""
