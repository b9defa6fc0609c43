//! Every reason in a pool's conditions, with its meaning and what to do: the table that the code and the manual share.

macro_rules! reasons {
    ($($name:ident: $help:literal,)*) => {
        /// The reason of a WorkerPool's condition.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Reason {
            $(#[doc = $help] $name,)*
        }

        impl Reason {
            /// All reasons.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Returns the name in conditions and Events.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* }
            }

            /// Returns the meaning, and what to do.
            pub fn help(self) -> &'static str {
                match self { $(Self::$name => $help,)* }
            }
        }
    };
}

reasons! {
    Serving: "Workers of the pool are connected to the Provider's relays.",
    ScaledToZero: "The pool is at zero, as it was asked to be; with `scaling`, a request for one of its models wakes it.",
    WaitingForWorkers: "Pods are being created or are loading, or their workers have not registered yet. If it stays so: `kubectl describe` the Pods, and the log of their container modelrelay-worker.",
    NotConnected: "Pods have been ready for half a minute and none of their workers is known to a relay. The log of the container modelrelay-worker says why.",
    BackendsNotAnswering: "Pods have been ready for half a minute, or unready for ten minutes, and their workers are connected, but none advertises a model: no backend answers, because it still loads its model (a large one takes longer, and the state changes by itself), listens on another port than `spec.backend` says, or serves nothing that `spec.models` lists. The logs of the backend and of the container modelrelay-worker say which.",
    NoPods: "No Pod in the namespace carries the label modelrelay.io/pool with the pool's name. Set it on the Pod template of the backends. If it is there, the Events of whatever creates the Pods say why it cannot.",
    PodsNotCreated: "The Deployment, the pool's or your own, cannot create its Pods; the message says why, for example a quota, a policy, or what the webhook refuses.",
    PodsNotInjected: "Some labelled Pods have no worker: they were created while the webhook was away or before it was installed. Delete them, so that their controller creates new ones.",
    ProviderNotFound: "There is no Provider of that name in the namespace. The pool waits and comes alive when it appears.",
    ProviderDisabled: "The Provider has `enabled: false`, so its relays turn workers away.",
    RelaysUnknown: "The operator has not heard from the Provider's relays yet. Look at the Provider's own conditions if it stays so.",
    RelaysUnreachable: "None of the Provider's relays answers the operator. Look at the Provider's own conditions.",
    RollingOut: "The Deployment or DaemonSet is replacing or adding Pods.",
    NameTaken: "An object of a name that the pool needs exists and is not the pool's. Rename or delete it, or make a pool of another name.",
    TemplateInvalid: "The API server, or the operator, cannot use the template; the message says where. It is tried again when the pool changes.",
    InvalidSpec: "The spec says something that cannot be done; the message names the field.",
    SlotsQuarantined: "Memory of a slot could not be freed, so it takes nothing; Ready is False where that is all slots of the pool and no worker without slots serves. Something outside the worker holds the GPU, or a backend would not end: `status.slots` names the workers, their logs say what was tried. Free it and restart the Pod, or order `unload` with mode `now` through the relay's admin API.",
    ModelsUnknown: "The pool is at zero and it is not known which models would wake it. List them in `spec.models`, or set `spec.replicas` to 1 once: what its workers advertise is remembered.",
    ScalingConflict: "Somebody else writes `spec.replicas` while `spec.scaling` is set: an HPA, KEDA, a person, or a manifest that is applied again and again. Use one of the two. A number by somebody else is not lowered for one scaleDownDelay; after two within that time the operator writes none itself until one scaleDownDelay without another has gone by. Or somebody scales the pool's Deployment instead of the pool, and the message names them: point an HPA's or KEDA's scaleTargetRef at the WorkerPool.",
    Forbidden: "The API server does not let the operator write an object; the message says which. The chart's RBAC was changed, or a policy or quota refuses it. It is tried again.",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_accepted_by_api() {
        for reason in Reason::ALL {
            assert!(reason.as_str().chars().all(|c| c.is_ascii_alphanumeric()), "{reason:?}");
            assert!(!reason.help().is_empty());
        }
    }
}
