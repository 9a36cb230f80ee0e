//! What this crate tells of itself through the `metrics` facade: without a recorder it costs next to nothing. An endpoint tells the recorder
//! that was installed when it was opened.

use ::metrics::{Counter, Gauge, Unit, counter, describe_counter, describe_gauge, gauge};

const IN_FLIGHT: &str = "quarry_fabric_operations_in_flight";
const OPENED: &str = "quarry_fabric_endpoints_opened_total";
const CLOSED: &str = "quarry_fabric_endpoints_closed_total";
const CLOSED_BY_DEADLINE: &str = "quarry_fabric_endpoints_deadline_closed_total";

/// Says what the metrics of this crate mean, to the recorder that is installed, and begins them at zero.
pub fn describe_metrics() {
    describe_gauge!(IN_FLIGHT, Unit::Count, "One-sided reads and writes that this process has under way.");
    describe_counter!(OPENED, Unit::Count, "Fabric endpoints that were opened.");
    describe_counter!(CLOSED, Unit::Count, "Fabric endpoints that were closed, for whatever reason.");
    describe_counter!(
        CLOSED_BY_DEADLINE,
        Unit::Count,
        "Fabric endpoints that were closed because an operation did not complete by its deadline."
    );
    let _zero = Meters::new();
}

/// What an endpoint counts.
pub(crate) struct Meters {
    in_flight: Gauge,
    pub(crate) opened: Counter,
    pub(crate) closed: Counter,
    pub(crate) closed_by_deadline: Counter,
}

impl Meters {
    pub(crate) fn new() -> Self {
        let in_flight = gauge!(IN_FLIGHT);
        in_flight.increment(0.0);
        Self {
            in_flight,
            opened: counter!(OPENED),
            closed: counter!(CLOSED),
            closed_by_deadline: counter!(CLOSED_BY_DEADLINE),
        }
    }

    /// An operation begins; it is under way until what this answers is dropped.
    pub(crate) fn begin(&self) -> InFlight {
        self.in_flight.increment(1.0);
        InFlight(self.in_flight.clone())
    }
}

/// Counts an operation as under way.
pub(crate) struct InFlight(Gauge);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.decrement(1.0);
    }
}
