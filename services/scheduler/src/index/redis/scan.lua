-- KEYS[1] meta  [2] flows  [3] sizes  [4] ended  [5] buckets
-- ARGV[1] prefix of other keys  [2] until, ms  [3] now, ms  [4] limit of rows  [5] limit of bytes  [6] rotation
--     [7] due time of the row after which to read flows without a position, or ''  [8] its id  [9] limit of their rows
-- then, for each position: flow, due time of the row after which to read or '', its id, until, and the limit of rows, or -1
--     to only count
-- Returns the checkpoint and, if there is one, the number of flows, then for each: its name, its first due time, the number of
-- due jobs, whether the rows are complete, and the number of rows; then for each row: id, due time and record.
local found = mark()
if not found[2] then
  return found
end
local prefix, now = ARGV[1], tonumber(ARGV[3])

local positions = {}
for i = 10, #ARGV, 5 do
  positions[ARGV[i]] = i + 1
end

-- Whether a is greater than b, byte by byte. Lua's comparison of strings depends on the locale of the server.
local function is_behind(a, b)
  for i = 1, 16 do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then
      return x > y
    end
  end
  return false
end

-- The number of jobs up to and including a row. The row may be gone. Rows with equal due times are ordered by id, and there
-- can be many of them, so a binary search finds the position.
local function rank_after(set, due, id)
  local first = redis.call('ZCOUNT', set, '-inf', '(' .. due)
  local last = redis.call('ZCOUNT', set, '-inf', due)
  while first < last do
    local middle = math.floor((first + last) / 2)
    if is_behind(redis.call('ZRANGE', set, middle, middle)[1], id) then
      last = middle
    else
      first = middle + 1
    end
  end
  return first
end

local names = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[2], 'WITHSCORES')
local sizes = sizes_of(names, 1, 2)
local flows = {}
for n = 0, #sizes - 1 do
  local i = (n + tonumber(ARGV[6])) % #sizes + 1
  local name, first = names[i * 2 - 1], names[i * 2]
  local set = prefix .. 'due:' .. name
  if redis.call('ZCARD', set) ~= tonumber(sizes[i]) then
    return without_mark()
  end
  -- `start` and `stop` are the ranks of the rows that may be read, `wanted` limits their number.
  local flow = {name = name, first = first, set = set, due = 0, start = 0, stop = 0, wanted = 0, read = 0, rows = {}}
  if tonumber(first) <= now then
    flow.due = redis.call('ZCOUNT', set, '-inf', ARGV[3])
  end
  local due, id, horizon, limit = ARGV[7], ARGV[8], ARGV[2], tonumber(ARGV[9])
  local position = positions[name]
  if position then
    due, id, horizon, limit = ARGV[position], ARGV[position + 1], ARGV[position + 2], tonumber(ARGV[position + 3])
  end
  flow.is_only_counted = limit < 0
  if not flow.is_only_counted then
    if horizon == ARGV[3] then
      flow.stop = flow.due
    else
      flow.stop = redis.call('ZCOUNT', set, '-inf', horizon)
    end
    if due ~= '' and tonumber(due) >= tonumber(first) then
      flow.start = rank_after(set, due, id)
    end
    flow.wanted = math.max(math.min(limit, flow.stop - flow.start), 0)
  end
  flows[n + 1] = flow
end

-- The records of these ids, in order; nil if one is missing. Neighbouring jobs often share a bucket, so each bucket is read
-- once.
local function records_of(ids)
  local buckets = {}
  for i, id in ipairs(ids) do
    local a, b, c, d, e, f, g = string.byte(id, 9, 15)
    local high = ((((a % 128 * 256 + b) * 256 + c) * 256 + d) * 256 + e) * 256 + f
    local name = high * 64 + math.floor(g / 4)
    local bucket = buckets[name]
    if not bucket then
      bucket = {ids = {}, places = {}}
      buckets[name] = bucket
    end
    bucket.ids[#bucket.ids + 1] = id
    bucket.places[#bucket.places + 1] = i
  end
  local records = {}
  for name, bucket in pairs(buckets) do
    local key = prefix .. 'job:' .. string.format('%.0f', name)
    for i, record in ipairs(redis.call('HMGET', key, unpack(bucket.ids))) do
      if not record then
        return nil
      end
      records[bucket.places[i]] = record
    end
  end
  return records
end

local rows, bytes, limit, byte_limit, current = 0, 0, tonumber(ARGV[4]), tonumber(ARGV[5]), 1
while rows < limit and (rows == 0 or bytes < byte_limit) do
  -- Read about as many rows as fit, by the mean size of the rows so far.
  local some = math.min(limit - rows, 512)
  if rows == 0 then
    some = math.min(some, 32)
  elseif bytes > 0 then
    some = math.min(some, math.ceil((byte_limit - bytes) * rows / bytes))
  end
  local ids, dues, owners = {}, {}, {}
  while #ids < some and current <= #flows do
    local flow = flows[current]
    local count = math.min(flow.wanted - flow.read, some - #ids)
    if count > 0 then
      local start = flow.start + flow.read
      local range = redis.call('ZRANGE', flow.set, start, start + count - 1, 'WITHSCORES')
      for i = 1, #range, 2 do
        local place = #ids + 1
        ids[place], dues[place], owners[place] = range[i], range[i + 1], flow
      end
      flow.read = flow.read + count
    end
    if flow.read == flow.wanted then
      current = current + 1
    end
  end
  if #ids == 0 then
    break
  end
  local records = records_of(ids)
  if not records then
    return without_mark()
  end
  for i, record in ipairs(records) do
    if rows > 0 and bytes >= byte_limit then
      break
    end
    local list = owners[i].rows
    local place = #list
    list[place + 1], list[place + 2], list[place + 3] = ids[i], dues[i], record
    rows, bytes = rows + 1, bytes + #record
  end
end

found[3] = #flows
local place = 3
for _, flow in ipairs(flows) do
  local count, is_complete = #flow.rows / 3, 0
  if not flow.is_only_counted and flow.start + count >= flow.stop then
    is_complete = 1
  end
  found[place + 1], found[place + 2], found[place + 3] = flow.name, flow.first, flow.due
  found[place + 4], found[place + 5] = is_complete, count
  place = place + 5
  for i, value in ipairs(flow.rows) do
    found[place + i] = value
  end
  place = place + #flow.rows
end
return found
