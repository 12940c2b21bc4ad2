"""Names of everything PageStream keeps in Redis.

    {E}:requests   stream  Submit, Attach, Stop, Abort, GatewayLost, Pin, Drain
    {E}:plans      stream  EpochStarted, StepPlan
    {E}:outputs    stream  EpochStarted, RequestState, StepResult, ..., RequestEnded
    {E}:snapshots  stream  PoolSnapshot
    {E}:prompts    stream  EpochStarted, Prompt
    {E}:info       string  EngineInfo, expires
    {E}:worker:R   string  WorkerInfo of rank R, expires
    {E}:gateway:I  string  lease of the gateway instance I, expires
    {E}:response:ID        stream  ResponseAsked, ResponseTokens, ..., ResponseEnded; expires
    {E}:response-lease:ID  string  the gateway that finishes it in the background, expires
    {E}:response-queue     stream  QueuedJob
    {E}:response-bytes:T   hash    bytes of an API key's responses, by time; expires
    {E}:file:ID            string  FileInfo: a file of /v1/files; expires
    {E}:file-pieces:ID     stream  FilePiece: its bytes; expires
    {E}:file-names:T       stream  ids of an API key's files; expires
    {E}:file-bytes:T       hash    bytes of an API key's files and batches, by time; expires
    {E}:batch:ID           stream  BatchState, one entry: a batch of /v1/batches; expires
    {E}:batch-lease:ID     string  the gateway that works on it, expires
    {E}:batch-names:T      stream  ids of an API key's batches; expires
    {E}:batch-queue        stream  QueuedJob
    engines        set     ids of all engines that ever existed, for operators

In the directory of a fleet, which may be another Redis:

    engines        set     ids of all engines that ever existed
    engine:E       string  EngineInfo with the URL of the engine's Redis, expires
    placement:ID   string  the engine that a request belongs to, and how often it was moved; expires
    kept:ID        string  Submit of a stream that can be resumed; expires
    routes:M       stream  Routed: where prompts for model M were sent; expires

The braces are a Redis Cluster hash tag: all keys of one engine live on one node. Those of a
directory have none, and live on all nodes.
"""

from dataclasses import dataclass

ENGINES = "engines"


def engine_lease(engine_id: str) -> str:
    """Lease of an engine in the directory of a fleet."""
    return f"engine:{engine_id}"


def placement(request_id: str) -> str:
    """Placement of a request in the directory of a fleet."""
    return f"placement:{request_id}"


def kept_request(request_id: str) -> str:
    """A request in the directory of a fleet, for when its gateway and engine are lost at once."""
    return f"kept:{request_id}"


def routes(model_name: str) -> str:
    """Where gateways sent prompts for a model, in the directory of a fleet."""
    return f"routes:{model_name}"


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """Keys of one engine."""

    engine_id: str

    @property
    def requests(self) -> str:
        return f"{{{self.engine_id}}}:requests"

    @property
    def plans(self) -> str:
        return f"{{{self.engine_id}}}:plans"

    @property
    def outputs(self) -> str:
        return f"{{{self.engine_id}}}:outputs"

    @property
    def snapshots(self) -> str:
        return f"{{{self.engine_id}}}:snapshots"

    @property
    def prompts(self) -> str:
        return f"{{{self.engine_id}}}:prompts"

    @property
    def info(self) -> str:
        return f"{{{self.engine_id}}}:info"

    def worker(self, rank: int) -> str:
        """Lease of one worker."""
        return f"{{{self.engine_id}}}:worker:{rank}"

    def gateway(self, instance: str) -> str:
        """Lease of a gateway that has requests here."""
        return f"{{{self.engine_id}}}:gateway:{instance}"

    def response(self, response_id: str) -> str:
        """What became of a response of the Responses API."""
        return f"{{{self.engine_id}}}:response:{response_id}"

    def response_lease(self, response_id: str) -> str:
        """Lease of the gateway that finishes a response in the background."""
        return f"{{{self.engine_id}}}:response-lease:{response_id}"

    @property
    def response_queue(self) -> str:
        """Responses in the background that may not have ended."""
        return f"{{{self.engine_id}}}:response-queue"

    def response_bytes(self, tenant: str) -> str:
        """Bytes that the responses of an API key hold."""
        return f"{{{self.engine_id}}}:response-bytes:{tenant}"

    def file(self, file_id: str) -> str:
        """What a file is; it is there as long as this key."""
        return f"{{{self.engine_id}}}:file:{file_id}"

    def file_pieces(self, file_id: str) -> str:
        """The bytes of a file."""
        return f"{{{self.engine_id}}}:file-pieces:{file_id}"

    def file_names(self, tenant: str) -> str:
        """The files of an API key, in the order in which they were made."""
        return f"{{{self.engine_id}}}:file-names:{tenant}"

    def file_bytes(self, tenant: str) -> str:
        """Bytes that the files and batches of an API key hold."""
        return f"{{{self.engine_id}}}:file-bytes:{tenant}"

    def batch(self, batch_id: str) -> str:
        """What has become of a batch."""
        return f"{{{self.engine_id}}}:batch:{batch_id}"

    def batch_lease(self, batch_id: str) -> str:
        """Lease of the gateway that works on a batch."""
        return f"{{{self.engine_id}}}:batch-lease:{batch_id}"

    def batch_names(self, tenant: str) -> str:
        """The batches of an API key, in the order in which they were made."""
        return f"{{{self.engine_id}}}:batch-names:{tenant}"

    @property
    def batch_queue(self) -> str:
        """Batches that may not have ended."""
        return f"{{{self.engine_id}}}:batch-queue"
