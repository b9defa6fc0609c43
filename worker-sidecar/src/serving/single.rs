//! One backend, its concurrency slots and its models.

use std::sync::Arc;

use arc_swap::ArcSwap;

use super::ServingContext;
use super::catalogue::Catalogue;
use crate::backend::Backend;
use crate::link::{Advertised, Capacity, Link, Links};
use crate::settings::Live;
use crate::shutdown::Drain;

/// One backend, its concurrency slots and its models.
#[derive(Debug)]
pub struct SingleBackend {
    backend: ArcSwap<Backend>,
    /// The worker's concurrency slots.
    pub capacity: Arc<Capacity>,
    /// The backend's models.
    pub catalogue: Catalogue,
    /// The settings that a reload changes.
    pub live: Arc<ArcSwap<Live>>,
    /// Live links.
    pub links: Arc<Links>,
    /// The drain state.
    pub drain: Arc<Drain>,
}

impl SingleBackend {
    pub(super) fn new(ServingContext { live, links, drain, failing, metrics }: ServingContext) -> Self {
        let Live { backend, max_concurrency, .. } = &**live.load();
        let capacity = Capacity::new(*max_concurrency);
        Self {
            backend: ArcSwap::from_pointee(Backend::new(backend.clone())),
            catalogue: Catalogue::new(Arc::clone(&links), Arc::clone(&capacity), failing, metrics),
            capacity,
            live,
            links,
            drain,
        }
    }

    /// Returns the current backend.
    pub fn backend(&self) -> Arc<Backend> {
        self.backend.load_full()
    }

    pub(super) fn attach(&self, link: &Arc<Link>, registered: &Advertised) {
        self.catalogue.attach(registered, |changed| {
            self.links.insert(link);
            if let Some(advertised) = changed {
                link.announce(advertised, self.capacity.load());
            }
        });
        self.capacity.join(link);
    }

    pub(super) fn reconfigure(&self, old: &Live, new: &Live) {
        if new.max_concurrency != old.max_concurrency {
            self.capacity.set(new.max_concurrency);
        }
        if new.backend != old.backend {
            self.backend.store(Arc::new(Backend::new(new.backend.clone())));
        }
        if new.backend.url != old.backend.url || new.backend.engine != old.backend.engine {
            self.catalogue.reset();
        } else if new.backend != old.backend || new.models != old.models || new.model_details != old.model_details {
            self.catalogue.poll_now();
        }
    }
}
