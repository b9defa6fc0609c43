//! Notes for the user about a worker in a Pod, and the reasons to refuse one.

use std::fmt;

use modelrelay_protocol::units::UnitError;

/// A note for the user: a warning at admission, an Event otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// The backend's container has its own preStop hook.
    HasPreStop {
        /// The container.
        container: String,
    },
    /// No container of a multiplexer's slots could be identified.
    NoSlotContainer,
    /// The Pod should end some day, but the worker would keep it running.
    NeverCompletes,
    /// The Pod was Guaranteed, and with this worker it is not.
    LosesGuaranteed,
    /// The Pod resolves names as its node does, and the node does not know the relay's Service.
    NodeNames,
}

impl Note {
    /// Returns the reason of the Event about it.
    pub fn event_reason(&self) -> &'static str {
        match self {
            Self::NodeNames => "RelayNameUnresolvable",
            Self::HasPreStop { .. } | Self::NoSlotContainer | Self::NeverCompletes | Self::LosesGuaranteed => {
                "BackendMayStopEarly"
            }
        }
    }
}

/// The change that lets a Pod resolve the relay's Service.
pub const NODE_NAMES: &str = "with hostNetwork and dnsPolicy ClusterFirst, or with dnsPolicy Default, a worker cannot \
                              resolve the name of the relay's Service: set dnsPolicy: ClusterFirstWithHostNet";

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HasPreStop { container } => write!(
                f,
                "container {container} has a preStop hook, so the hook that waits for running requests was not added: \
                 when the Pod stops, running requests have only as long as that hook takes"
            ),
            Self::NoSlotContainer => f.write_str(
                "no container declares the port of a slot of the multiplexer, so none waits for running requests when \
                 the Pod stops: declare the ports in the containers' ports",
            ),
            Self::NeverCompletes => f.write_str(
                "with injectMode Container, a Pod with restartPolicy Never or OnFailure never completes, because the \
                 worker keeps running: use NativeSidecar",
            ),
            Self::NodeNames => f.write_str(NODE_NAMES),
            Self::LosesGuaranteed => f.write_str(
                "the Pod loses the QoS class Guaranteed, which CPU pinning requires: set equal requests and limits of cpu \
                 and memory in spec.sidecar.resources of the pool",
            ),
        }
    }
}

/// The reason that a Pod cannot have a worker. Each message states what to change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The value is not a valid Pod.
    #[error("{field} must be {wanted}")]
    Malformed {
        /// The field.
        field: &'static str,
        /// The expected type.
        wanted: &'static str,
    },
    /// There is no container that could be the backend.
    #[error("the Pod has no container that could be the backend")]
    NoContainers,
    /// The Pod has no container of the given name.
    #[error("spec.backend.container of the pool is {name}, but the Pod has {}", list(.present))]
    NoSuchContainer {
        /// The name.
        name: String,
        /// The existing containers.
        present: Vec<String>,
    },
    /// Two containers would listen on one port.
    #[error(
        "container {container} declares port {port}, which the worker needs for probes: set spec.sidecar.port of the pool to another port"
    )]
    PortTaken {
        /// The port.
        port: i32,
        /// The other container.
        container: String,
    },
    /// The worker and the backend of the pool would listen on one port.
    #[error(
        "port {port} is used by both the backend and the worker: set spec.sidecar.port of the pool to another port"
    )]
    BackendPort {
        /// The port.
        port: i32,
    },
    /// The worker's port would be one of the node.
    #[error(
        "the Pod uses hostNetwork, so the worker listens on a port of the node: set spec.sidecar.port of the pool to \
         a port that is free on every node"
    )]
    HostNetwork,
    /// A volume has the name of one of the worker's volumes.
    #[error("the worker needs a volume named {name}: rename the Pod's volume")]
    VolumeTaken {
        /// The name.
        name: String,
    },
    /// A container has the worker's name.
    #[error(
        "spec.{list} has a container named modelrelay-worker, which is the name of the worker that the operator adds: \
         rename that container, or set the label modelrelay.io/pool to none if it is a worker with its own settings"
    )]
    ContainerTaken {
        /// `containers` or `initContainers`.
        list: &'static str,
    },
    /// A variable is set that a field determines.
    #[error("{place} sets {name}, which is derived from {source_field}: remove it")]
    ReservedEnv {
        /// The field in which it is set.
        place: &'static str,
        /// The variable.
        name: String,
        /// The field.
        source_field: &'static str,
    },
    /// The worker starts engines, and no container has their image.
    #[error(
        "the multiplexer starts programs, so the worker runs in the container that contains them: name that container \
         modelrelay-worker in spec.template.spec.containers, or set spec.sidecar.image to an image with the programs and the worker"
    )]
    NoEngineContainer,
    /// The container already runs another program.
    #[error(
        "container modelrelay-worker sets {field}, but it runs the worker: remove {field}, and set the engine's command as \
         command of its model in spec.multiplexer"
    )]
    EngineCommand {
        /// `command` or `args`.
        field: &'static str,
    },
    /// The worker does not exist for Windows.
    #[error(
        "the Pod runs on Windows, but the worker needs Linux: remove the label modelrelay.io/pool, or set it to none"
    )]
    Windows,
    /// The pool's timeout cannot be parsed.
    #[error("spec.shutdownTimeout of the pool: {0}")]
    ShutdownTimeout(UnitError),
}

fn list(names: &[String]) -> String {
    match names {
        [] => "no container".to_owned(),
        names => names.join(", "),
    }
}
