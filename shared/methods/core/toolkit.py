"""What a method file needs of promptfed under one name: ``from promptfed.shared.methods.core import toolkit as pf``."""

from promptfed.shared.methods.core.interface.base import Classifier as Classifier
from promptfed.shared.methods.core.interface.base import ClientContext as ClientContext
from promptfed.shared.methods.core.interface.base import ClientInfo as ClientInfo
from promptfed.shared.methods.core.interface.base import ClientUpdate as ClientUpdate
from promptfed.shared.methods.core.interface.base import Combine as Combine
from promptfed.shared.methods.core.interface.base import Hyperparameters as Hyperparameters
from promptfed.shared.methods.core.interface.base import LabelSpace as LabelSpace
from promptfed.shared.methods.core.interface.base import Method as Method
from promptfed.shared.methods.core.interface.base import MethodError as MethodError
from promptfed.shared.methods.core.interface.base import Needs as Needs
from promptfed.shared.methods.core.interface.base import NeedsBackbone as NeedsBackbone
from promptfed.shared.methods.core.interface.base import OwnOptions as OwnOptions
from promptfed.shared.methods.core.interface.base import Phase as Phase
from promptfed.shared.methods.core.interface.base import ServerContext as ServerContext
from promptfed.shared.methods.core.interface.base import Split as Split
from promptfed.shared.methods.core.interface.base import TrainResult as TrainResult
from promptfed.shared.methods.core.interface.base import Updates as Updates
from promptfed.shared.methods.core.interface.disclosures import AGGREGATE as AGGREGATE
from promptfed.shared.methods.core.interface.disclosures import Disclosed as Disclosed
from promptfed.shared.methods.core.interface.insights import Measured as Measured
from promptfed.shared.methods.core.interface.protection import Objective as Objective
from promptfed.shared.methods.core.text_features import template_features as template_features
from promptfed.shared.methods.core.training import Group as Group
from promptfed.shared.methods.core.training import train as train
from promptfed.shared.spec.spec import BackboneShape as BackboneShape
from promptfed.shared.spec.spec import FederationSpec as FederationSpec
