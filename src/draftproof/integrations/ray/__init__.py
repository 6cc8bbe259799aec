"""Ray carries the engine over a cluster: Ray Data's `map_batches`, `draftproof batch --ray`, and Ray Serve."""

from draftproof.batch.rows import RowOptions
from draftproof.integrations.ray.cluster import cluster_answers
from draftproof.integrations.ray.data import Generate
from draftproof.integrations.ray.service import deployment

__all__ = ["Generate", "RowOptions", "cluster_answers", "deployment"]
