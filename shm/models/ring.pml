/*
 * The command ring: one producer (a send block), one consumer (a proxy thread), and the network that reads the
 * producer's source bytes. README.md maps the steps to the code.
 *
 * Commands are numbered modulo 8, so the model runs for ever and every wrap is in it. Shared memory is weak: a plain
 * store is `pending` until it becomes visible at some later time; a release store first makes all earlier ones visible.
 *
 * -DFENCE: the session may be fenced at any time.
 * -DHOSTILE: instead of the producer, somebody writes anything anywhere in the segment.
 * -DM_...: mutants, each of which must fail (models.txt).
 */
#define LOG2 1
#define SLOTS 2         /* ring.slot_count() */
#define NUMBERS 8       /* of commands, and so of both counters; in the code 2^64 */
#define SOURCES 4       /* pieces of source memory, used in turn: more than slots, so only `completed` guards them */
#define OUTSTANDING 2   /* outstanding_max */
#define WINDOW 4        /* LaneWindow: twice OUTSTANDING */
#define FLAG_ONLY(s) ((s) == 4 || (s) == 5) /* which commands are kWriteFlag, without source bytes */
#define NONE 255

#define NEXT(s) (((s) + 1) % NUMBERS)
#define AHEAD(a, b) (((a) + NUMBERS - (b)) % NUMBERS) /* how far a is ahead of b */
#define PARITY(s) (1 - (((s) >> LOG2) & 1))           /* lap_parity(): 1 in even laps */

/* --- Shared memory, zero at first --- */
byte words[SLOTS] = 0;       /* words 0..4 of a slot: the number of the command they describe */
byte pending[SLOTS] = NONE;  /* a plain store to them that is not visible yet */
byte parity[SLOTS] = 0;      /* the commit word's two fields */
byte sequence[SLOTS] = 0;
byte consumed = 0;           /* LaneControl */
byte completed = 0;
bool aborted = false;        /* SegmentHeader::abort_flag */
byte source[SOURCES] = NONE; /* source[s % SOURCES] holds what command s sends */

/* --- The consumer's own --- */
#define GONE 0
#define TAKEN 1
#define POSTED 2
#define COMPLETED 3
byte taken = 0;         /* RingConsumer::consumed, and LaneWindow::tail_ */
byte head = 0;          /* LaneWindow::head_ */
byte state[WINDOW];     /* InFlight::state */
byte sends[WINDOW];     /* the words that were copied */
byte outstanding = 0;
bool fenced = false;
byte again = NONE;      /* a completion that the network will report once more */

byte produced = 0;
byte consumed_seen = 0;

#ifdef HOSTILE
#define VALID(copy) ((copy) < 4)
#define SEQUENCE_MATCHES true /* whoever attacks can match it */
active proctype hostile() {
end:
  do
  :: words[0] = 3 - words[0]
  :: words[1] = 7 - words[1] /* not valid every other time */
  :: parity[0] = 1 - parity[0]
  :: parity[1] = 1 - parity[1]
  od
}
#else
#define VALID(copy) ((copy) == taken)
#define SEQUENCE_MATCHES (number == taken)

/* Plain stores become visible in any order. */
active proctype memory() {
end:
  do
  :: atomic { pending[0] != NONE -> words[0] = pending[0]; pending[0] = NONE }
  :: atomic { pending[1] != NONE -> words[1] = pending[1]; pending[1] = NONE }
  od
}

#ifdef M_CREDIT_OFF_BY_ONE
#define CREDIT (AHEAD(produced, consumed_seen) <= SLOTS)
#else
#define CREDIT (AHEAD(produced, consumed_seen) < SLOTS)
#endif
#ifdef M_WAIT_IGNORES_ABORT
#define LEAVES false
#else
#define LEAVES aborted
#endif

active proctype producer() {
  do
  :: /* RingProducer::has_credit(): reads the daemon's counter only when the cached credits are used up. */
    do
    :: CREDIT -> break
    :: atomic { !CREDIT && consumed_seen != consumed -> consumed_seen = consumed }
    :: LEAVES -> goto left
    od;
    if
    :: !FLAG_ONLY(produced) ->
#ifndef M_NO_COMPLETED_WAIT
      /* wait_completed(): the bytes of SOURCES commands ago have been read. */
      if
      :: AHEAD(produced, completed) < SOURCES
      :: LEAVES -> goto left
      fi;
#endif
      source[produced % SOURCES] = produced
    :: else
    fi;
    /* try_push() */
#ifdef M_COMMIT_BEFORE_WORDS
    d_step { parity[produced % SLOTS] = PARITY(produced); sequence[produced % SLOTS] = produced };
    pending[produced % SLOTS] = produced;
#else
    pending[produced % SLOTS] = produced;
#ifndef M_COMMIT_RELAXED
    pending[produced % SLOTS] == NONE; /* release */
#endif
    d_step {
#ifdef M_PARITY_FIXED
      parity[produced % SLOTS] = 1;
#else
      parity[produced % SLOTS] = PARITY(produced);
#endif
      sequence[produced % SLOTS] = produced
    };
#endif
progress_pushed:
    produced = NEXT(produced)
  od;
left:
  skip
}
#endif

/* What take_next() asks before it looks at the ring. */
#ifdef M_WINDOW_UNGUARDED
#define ROOM (outstanding < OUTSTANDING)
#else
#define ROOM (outstanding < OUTSTANDING && AHEAD(taken, head) < WINDOW)
#endif

/* The proxy's pass over the lane. */
active proctype consumer() {
  byte copy, number;
end:
  do
  :: atomic { !fenced && ROOM && parity[taken % SLOTS] == PARITY(taken) -> number = sequence[taken % SLOTS] };
#ifdef M_CONSUMED_BEFORE_COPY
    consumed = NEXT(taken);
#endif
    copy = words[taken % SLOTS];
    atomic {
      if
      :: SEQUENCE_MATCHES && VALID(copy)
      :: else -> /* check_command() finds a flaw: fault() */
#ifndef HOSTILE
        assert(false); /* a committed slot does not hold its command */
#endif
        fenced = true; aborted = true
      fi
    };
#ifdef M_SLOT_READ_TWICE
    copy = words[taken % SLOTS];
#endif
    d_step {
      if
      :: fenced -> skip
      :: else ->
        assert(AHEAD(taken, head) < WINDOW); /* LaneWindow::open() */
        assert(VALID(copy)); /* what is sent is what was checked */
        state[taken % WINDOW] = TAKEN;
        sends[taken % WINDOW] = copy;
        outstanding++;
        assert(outstanding <= OUTSTANDING);
        taken = NEXT(taken);
        if :: again == taken -> again = NONE :: else fi /* cookies are no longer than this */
      fi;
      copy = 0; number = 0
    }
#ifndef HOSTILE
#ifndef M_CONSUMED_FORGOTTEN
  :: atomic { consumed != taken && !fenced -> consumed = taken } /* publish_consumed(), once for several commands */
#endif
#endif
#ifdef FENCE
  :: atomic { !fenced -> fenced = true; aborted = true } /* FenceSession, or a fault of another lane */
#endif
  od
}

/* The endpoint: takes writes when it has room, reads their sources, reports them in any order, and some of them twice. */
active proctype network() {
  byte at;
end:
  do
  /* LinkQueue::post() */
  :: atomic { !fenced && state[0] == TAKEN -> state[0] = POSTED }
  :: atomic { !fenced && state[1] == TAKEN -> state[1] = POSTED }
  :: atomic { !fenced && state[2] == TAKEN -> state[2] = POSTED }
  :: atomic { !fenced && state[3] == TAKEN -> state[3] = POSTED }
  :: atomic { /* the last byte has been read */
      if
      :: state[0] == POSTED -> at = 0
      :: state[1] == POSTED -> at = 1
      :: state[2] == POSTED -> at = 2
      :: state[3] == POSTED -> at = 3
      fi;
#ifndef HOSTILE
      /* The producer has not touched what is being sent. */
      assert(FLAG_ONLY(sends[at]) || source[sends[at] % SOURCES] == sends[at]);
#endif
      /* on_finished(): LaneWindow::complete() */
      state[at] = COMPLETED;
      outstanding--;
      if
#ifndef HOSTILE
      :: again == NONE -> again = sends[at]
#endif
      :: true
      fi;
      at = 0
    };
    atomic {
#ifdef M_COMPLETED_OUT_OF_ORDER
      head = NEXT(head);
#else
      do
      :: head != taken && state[head % WINDOW] == COMPLETED -> state[head % WINDOW] = GONE; head = NEXT(head)
      :: else -> break
      od;
#endif
#ifndef HOSTILE
      completed = head /* publish_completed() */
#endif
    }
  :: atomic { /* the second report: find_posted() answers null */
      again != NONE ->
      if
#ifdef M_SECOND_REPORT_COUNTS
      :: true ->
#else
      :: AHEAD(again, head) < AHEAD(taken, head) && state[again % WINDOW] == POSTED ->
#endif
        outstanding--;
        assert(outstanding <= OUTSTANDING);
        state[again % WINDOW] = COMPLETED
#ifndef M_SECOND_REPORT_COUNTS
      :: else
#endif
      fi;
      again = NONE
    }
  od
}
