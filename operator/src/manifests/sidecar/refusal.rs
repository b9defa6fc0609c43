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
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HasPreStop { container } => write!(
                f,
                "container {container} has a preStop hook, so the one that waits for running requests was not added: \
                 when the Pod stops, they have as long as that hook takes"
            ),
            Self::NoSlotContainer => f.write_str(
                "no container names the port of a slot of the multiplexer, so none waits for running requests when \
                 the Pod stops: name the ports in the containers' ports",
            ),
            Self::NeverCompletes => f.write_str(
                "injectMode Container keeps a Pod with restartPolicy Never or OnFailure from completing, because the \
                 worker goes on: use NativeSidecar",
            ),
            Self::LosesGuaranteed => f.write_str(
                "the Pod's quality of service is no longer Guaranteed, which CPU pinning needs: give spec.sidecar.resources \
                 of the pool equal requests and limits of cpu and memory",
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
    #[error("the Pod has no container for the worker to serve")]
    NoContainers,
    /// The Pod has no container of the given name.
    #[error("spec.backend.container of the pool names {name}, and the Pod has {}", list(.present))]
    NoSuchContainer {
        /// The name.
        name: String,
        /// The existing containers.
        present: Vec<String>,
    },
    /// Two containers would listen on one port.
    #[error(
        "container {container} declares port {port}, on which the worker serves probes: set spec.sidecar.port of the pool"
    )]
    PortTaken {
        /// The port.
        port: i32,
        /// The other container.
        container: String,
    },
    /// The worker and the backend of the pool would listen on one port.
    #[error("port {port} is both the backend's and the worker's own: set spec.sidecar.port of the pool")]
    BackendPort {
        /// The port.
        port: i32,
    },
    /// The worker's port would be one of the node.
    #[error(
        "the Pod uses hostNetwork, where the worker's port is one of the node's: set spec.sidecar.port of the pool to \
         one that is free on every node"
    )]
    HostNetwork,
    /// A volume has the name of one of the worker's volumes.
    #[error("volume {name} has the name of one of the worker's: rename it")]
    VolumeTaken {
        /// The name.
        name: String,
    },
    /// A variable is set that a field determines.
    #[error("{place} sets {name}, which comes from {source_field}")]
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
        "the multiplexer starts programs, so the worker runs in the container that has them: name that container \
         modelrelay-worker in spec.template.spec.containers, or set spec.sidecar.image to an image that has them and the worker"
    )]
    NoEngineContainer,
    /// The container already runs another program.
    #[error(
        "container modelrelay-worker has {field}, and the worker is what runs there: remove it, and say what starts an engine in \
         command of its model in spec.multiplexer"
    )]
    EngineCommand {
        /// `command` or `args`.
        field: &'static str,
    },
    /// The worker does not exist for Windows.
    #[error(
        "the worker runs on Linux and the Pod asks for Windows: remove the label modelrelay.io/pool, or set it to none"
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
