//! Assigns waiting requests to pools, where several serve the same model.
//!
//! Each request is assigned once. Running pools come before pools at zero; otherwise the order is that of their names.
//! Each pool takes as many waiting requests as it has room for at its greatest size, and the rest is passed to the
//! next. So one request wakes one pool, and none while a running pool can still grow. A pool that does not scale has
//! only the room that its workers have now, each for the models that it serves now: a pool that lists a model but has
//! no worker for it keeps no other pool asleep. The drawback: a pool that has room in theory, but whose new Pods cannot
//! be scheduled, keeps the next one asleep until its maxReplicas are requested.

use std::collections::{BTreeMap, BTreeSet};

use crate::relays::state::ModelReport;

/// A pool that may serve waiting requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sharer {
    /// Its name.
    pub name: String,
    /// True if it is at zero.
    pub asleep: bool,
    /// Its capacity: one place for a pool that scales, one for each worker of a pool that does not.
    pub places: Vec<ModelCapacity>,
}

/// Room for requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelCapacity {
    /// The models that it serves.
    pub models: BTreeSet<String>,
    /// The number of requests that fit.
    pub room: u64,
}

/// Returns the number of waiting requests by pool.
pub fn share(models: &BTreeMap<String, ModelReport>, mut pools: Vec<Sharer>) -> BTreeMap<String, u64> {
    pools.sort_by(|a, b| (a.asleep, &a.name).cmp(&(b.asleep, &b.name)));
    let mut shares = BTreeMap::new();
    for (model, report) in models {
        let mut waiting = report.waiting;
        for pool in &mut pools {
            for place in pool.places.iter_mut().filter(|place| place.models.contains(model)) {
                let taken = waiting.min(place.room);
                place.room -= taken;
                waiting -= taken;
                *shares.entry(pool.name.clone()).or_insert(0) += taken;
            }
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(name: &str, models: &[&str], asleep: bool, room: u64) -> Sharer {
        Sharer { name: name.into(), asleep, places: vec![place(models, room)] }
    }

    fn place(models: &[&str], room: u64) -> ModelCapacity {
        ModelCapacity { models: models.iter().map(|&model| model.to_owned()).collect(), room }
    }

    fn shares(waiting: &[(&str, u64)], pools: &[Sharer]) -> Vec<(String, u64)> {
        let report = |waiting| ModelReport { waiting, ..ModelReport::default() };
        let models = waiting.iter().map(|(model, waiting)| ((*model).to_owned(), report(*waiting))).collect();
        share(&models, pools.to_vec()).into_iter().filter(|(_, share)| *share > 0).collect()
    }

    fn are(expected: &[(&str, u64)]) -> Vec<(String, u64)> {
        expected.iter().map(|(name, share)| ((*name).to_owned(), *share)).collect()
    }

    #[test]
    fn single_request_wakes_one_pool() {
        let pools = [pool("b", &["m"], true, 128), pool("a", &["m"], true, 128)];
        assert_eq!(shares(&[("m", 1)], &pools), are(&[("a", 1)]));
    }

    #[test]
    fn running_pools_precede_sleeping_ones() {
        let pools = [pool("a", &["m"], true, 128), pool("b", &["m"], false, 128)];
        assert_eq!(shares(&[("m", 5)], &pools), are(&[("b", 5)]));
    }

    #[test]
    fn requests_beyond_capacity_go_to_next_pool() {
        let pools = [pool("a", &["m"], false, 10), pool("b", &["m"], true, 10), pool("c", &["m"], true, 10)];
        assert_eq!(shares(&[("m", 15)], &pools), are(&[("a", 10), ("b", 5)]));
        assert_eq!(shares(&[("m", 99)], &pools), are(&[("a", 10), ("b", 10), ("c", 10)]));
    }

    #[test]
    fn only_pools_with_model_get_shares() {
        let pools = [pool("a", &["m"], false, 10), pool("b", &["n"], true, 10)];
        assert_eq!(shares(&[("n", 1), ("other", 7)], &pools), are(&[("b", 1)]));
    }

    #[test]
    fn capacity_for_one_model_is_unavailable_to_another() {
        let fixed =
            Sharer { places: vec![place(&["m"], 4), place(&["n"], 1), place(&["m"], 2)], ..pool("a", &[], false, 0) };
        let pools = [fixed, pool("b", &["m", "n"], true, 10)];
        assert_eq!(shares(&[("m", 5), ("n", 3)], &pools), are(&[("a", 6), ("b", 2)]));
    }

    #[test]
    fn capacity_is_shared_between_models() {
        let pools = [pool("a", &["m", "n"], false, 10), pool("b", &["n"], true, 10)];
        assert_eq!(shares(&[("m", 8), ("n", 5)], &pools), are(&[("a", 10), ("b", 3)]));
    }
}
